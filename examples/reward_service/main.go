// A reward service in Go. It is made from the .proto files alone; a run uses it in place of `rolemesh serve reward`.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "rolemesh.example/reward/rolemesh/v1"
)

type rewards struct {
	pb.UnimplementedRewardServiceServer
}

// ComputeScores gives each answer 1 if the text after #### is the row's ground truth, else 0.
func (rewards) ComputeScores(stream pb.RewardService_ComputeScoresServer) (err error) {
	defer func() { // what batch.go says of a request that it cannot read
		if problem := recover(); problem != nil {
			err = failed(stream, codes.InvalidArgument, "InvalidBatch", fmt.Sprint("reward.compute_scores: ", problem))
		}
	}()
	request := receive(stream)
	masks, uids, rules := request.integers("response_mask"), request.texts("uid"), request.texts("reward_model")
	width := len(masks[0])
	scores, acc := make([]float32, len(masks)*width), make([]float32, len(masks))
	for row, tokens := range request.integers("responses") {
		var rule struct {
			GroundTruth *string `json:"ground_truth"`
		}
		if json.Unmarshal([]byte(rules.Value(row)), &rule) != nil || rule.GroundTruth == nil {
			return failed(stream, codes.FailedPrecondition, "RewardFailed", "row "+uids.Value(row)+": reward_model has no ground_truth")
		}
		text, last := decode(tokens, masks[row])
		if _, answer, _ := strings.Cut(text, "####"); strings.TrimSpace(answer) == *rule.GroundTruth {
			scores[row*width+last], acc[row] = 1, 1 // the reward comes with the last token
		}
	}
	answer := batch{FrameHeader: &pb.FrameHeader{NumRows: request.NumRows, MetaJson: "{}"}}
	answer.floats("token_level_scores", scores, request.NumRows, uint64(width))
	answer.floats("acc", acc, request.NumRows)
	log.Printf("scored %d answers", len(masks))
	return stream.Send(&pb.Frame{Header: answer.FrameHeader, Payload: answer.region})
}

// receive reads the one batch of a request.
func receive(stream pb.RewardService_ComputeScoresServer) (b batch) {
	for {
		frame, err := stream.Recv()
		if err == io.EOF && b.GetNumRows() > 0 && b.NumRows < maxRows && uint64(len(b.region)) == b.RegionBytes {
			return b
		} else if err != nil {
			panic(fmt.Sprint("the request is not one whole batch of 1 to ", maxRows, " rows"))
		}
		if b.FrameHeader == nil {
			b.FrameHeader = frame.Header
		}
		if b.region = append(b.region, frame.Payload...); uint64(len(b.region)) > min(b.GetRegionBytes(), maxBytes) {
			panic(fmt.Sprint("the region has more bytes than its header says, or than ", maxBytes))
		}
	}
}

// failed ends a call with a status and, for our own client, the class of the error (docs/errors.md).
func failed(stream grpc.ServerStream, code codes.Code, class, text string) error {
	stream.SetTrailer(metadata.Pairs("rolemesh-error", class))
	return status.Error(code, text)
}

func main() {
	listener, err := net.Listen("tcp", os.Args[1]) // host:port
	if err != nil {
		log.Fatal(err)
	}
	server, alive := grpc.NewServer(grpc.MaxRecvMsgSize(64<<20)), health.NewServer()
	pb.RegisterRewardServiceServer(server, rewards{})
	healthpb.RegisterHealthServer(server, alive)
	for _, name := range []string{"reward", "rolemesh.v1.RewardService", "live"} { // the client asks by the role's name
		alive.SetServingStatus(name, healthpb.HealthCheckResponse_SERVING)
	}
	log.Print("reward service at ", listener.Addr())
	log.Fatal(server.Serve(listener))
}
