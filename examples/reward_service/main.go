// A reward service in Go, which a run can use in place of `rolemesh serve reward`.
//
// A request is one batch: a header that describes its columns, and a region of bytes that has their values. frame.proto
// describes both, and data.proto the layouts of a column. This service reads four columns and answers with two.
package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log"
	"net"
	"os"
	"strings"

	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	pb "rolemesh.example/reward/rolemesh/v1"
)

type rewards struct {
	pb.UnimplementedRewardServiceServer
}

// ComputeScores gives an answer 1 if the text after #### is the row's ground truth, else 0.
func (rewards) ComputeScores(stream pb.RewardService_ComputeScoresServer) (err error) {
	defer func() { // the functions below panic if they cannot read the batch
		if problem := recover(); problem != nil {
			err = status.Error(codes.InvalidArgument, fmt.Sprint("reward.compute_scores: ", problem))
		}
	}()
	request := receive(stream)
	responses, masks := request.integers("responses"), request.integers("response_mask") // [B, T]
	rules, width := request.texts("reward_model"), len(responses[0])
	scores, acc := make([]float32, len(responses)*width), make([]float32, len(responses)) // [B, T] and [B]
	for row, tokens := range responses {
		text, last := []byte{}, 0
		for i, token := range tokens {
			if masks[row][i] == 1 {
				text, last = append(text, character(token)), i
			}
		}
		var rule struct {
			GroundTruth string `json:"ground_truth"`
		}
		if json.Unmarshal([]byte(rules.Value(row)), &rule) != nil || rule.GroundTruth == "" {
			return status.Error(codes.FailedPrecondition, "row "+request.texts("uid").Value(row)+" has no ground_truth")
		}
		if _, answer, _ := strings.Cut(string(text), "####"); strings.TrimSpace(answer) == rule.GroundTruth {
			scores[row*width+last], acc[row] = 1, 1 // the reward comes with the last token
		}
	}
	answer := batch{FrameHeader: &pb.FrameHeader{NumRows: request.NumRows, MetaJson: "{}"}}
	answer.add("token_level_scores", scores, request.NumRows, uint64(width))
	answer.add("acc", acc, request.NumRows)
	log.Printf("scored %d answers", len(responses))
	return stream.Send(&pb.Frame{Header: answer.FrameHeader, Payload: answer.region})
}

// character decodes a token of the demo's tokenizer. Ids 0 to 93 are the visible ASCII characters, in order.
func character(token uint64) byte {
	if token < 94 {
		return '!' + byte(token)
	}
	return ' '
}

// batch is a header and the region of bytes that it describes.
type batch struct {
	*pb.FrameHeader
	region []byte
}

// receive joins the frames of a request. The first one has the header.
func receive(stream pb.RewardService_ComputeScoresServer) (b batch) {
	for {
		frame, err := stream.Recv()
		if err != nil { // the end; a request that was cut off is too short to be read
			return b
		}
		if b.FrameHeader == nil {
			b.FrameHeader = frame.Header
		}
		b.region = append(b.region, frame.Payload...)
	}
}

// part returns some bytes of the region. It panics, as every slice of Go does, if they are not all there.
func (b batch) part(span *pb.Span) []byte {
	return b.region[span.GetOffset() : span.GetOffset()+span.GetNumBytes()]
}

// integers returns a column [B, T] of integers or bools. The sender chooses its layout by its content.
func (b batch) integers(name string) [][]uint64 {
	for _, column := range b.Tensors {
		if column.Name != name {
			continue
		}
		values, size := b.part(column.Data), sizes[column.WireDtype]
		rows := make([][]uint64, b.NumRows)
		for r := range rows {
			rows[r] = make([]uint64, column.Shape[1])
			first, end := b.held(column, r)
			for i := range rows[r] {
				switch {
				case i < first || i >= end:
					rows[r][i] = integer(column.Fill)
				case column.Layout == pb.Layout_LAYOUT_MASK:
					rows[r][i] = 1
				default:
					rows[r][i], values = integer(values[:size]), values[size:]
				}
			}
		}
		return rows
	}
	panic("there is no column " + name)
}

// held returns the first element of a row that the region has, and the end of those. The others have the column's fill.
func (b batch) held(column *pb.TensorSpec, row int) (first, end int) {
	switch column.Layout {
	case pb.Layout_LAYOUT_DENSE:
		return 0, int(column.Shape[1])
	case pb.Layout_LAYOUT_CONSTANT:
		return 0, 0
	case pb.Layout_LAYOUT_MASK, pb.Layout_LAYOUT_RAGGED:
		spans := b.part(b.Spans[column.SpanIndex]) // two int32 [B]: starts, then lengths
		first = int(integer(spans[4*row:][:4]))
		return first, first + int(integer(spans[4*(int(b.NumRows)+row):][:4]))
	}
	panic(fmt.Sprint("column ", column.Name, " has the layout ", column.Layout))
}

var sizes = map[pb.Dtype]int{ // bytes of the types that integers and bools are sent in
	pb.Dtype_DTYPE_BOOL: 1, pb.Dtype_DTYPE_UINT8: 1, pb.Dtype_DTYPE_UINT16: 2, pb.Dtype_DTYPE_INT32: 4, pb.Dtype_DTYPE_INT64: 8,
}

// integer reads a little-endian number of at most 8 bytes that is not negative.
func integer(data []byte) uint64 {
	var word [8]byte
	copy(word[:], data)
	return binary.LittleEndian.Uint64(word[:])
}

// texts returns a column that is not a tensor. Dicts of Python are JSON in it.
func (b batch) texts(name string) *array.LargeString {
	reader, err := ipc.NewReader(bytes.NewReader(b.part(b.Columns)))
	if err != nil || !reader.Next() {
		panic(fmt.Sprint("the Arrow columns cannot be read: ", err))
	}
	return reader.RecordBatch().Column(reader.Schema().FieldIndices(name)[0]).(*array.LargeString)
}

// add appends a column of float32. Each part of a region begins at a multiple of 64.
func (b *batch) add(name string, values []float32, shape ...uint64) {
	b.region = append(b.region, make([]byte, -len(b.region)&63)...)
	span := &pb.Span{Offset: uint64(len(b.region)), NumBytes: uint64(4 * len(values))}
	b.region, _ = binary.Append(b.region, binary.LittleEndian, values)
	b.RegionBytes = uint64(len(b.region))
	dtype, layout := pb.Dtype_DTYPE_FLOAT32, pb.Layout_LAYOUT_DENSE
	b.Tensors = append(b.Tensors, &pb.TensorSpec{Name: name, Dtype: dtype, WireDtype: dtype, Shape: shape, Layout: layout, Data: span})
}

func main() {
	listener, err := net.Listen("tcp", os.Args[1]) // host:port
	if err != nil {
		log.Fatal(err)
	}
	server, alive := grpc.NewServer(), health.NewServer()
	pb.RegisterRewardServiceServer(server, rewards{})
	healthpb.RegisterHealthServer(server, alive)
	alive.SetServingStatus("reward", healthpb.HealthCheckResponse_SERVING) // the controller waits for this name
	log.Print("reward service at ", listener.Addr())
	log.Fatal(server.Serve(listener))
}
