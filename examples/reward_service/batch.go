// A batch on the wire: a header and a region of bytes, in frames (proto/rolemesh/v1/frame.proto, docs/wire.md).
package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"

	pb "rolemesh.example/reward/rolemesh/v1"
)

const (
	maxBytes = 64 << 20 // of a request's region, and of a column once it is unpacked
	maxRows  = 1 << 20
)

var sizes = map[pb.Dtype]int{pb.Dtype_DTYPE_BOOL: 1, pb.Dtype_DTYPE_UINT8: 1, pb.Dtype_DTYPE_UINT16: 2, pb.Dtype_DTYPE_INT32: 4, pb.Dtype_DTYPE_INT64: 8}

// batch is one that has arrived whole. Its methods panic where the header points beyond the region, as Go checks the
// bounds of every slice; ComputeScores makes that an INVALID_ARGUMENT.
type batch struct {
	*pb.FrameHeader
	region []byte
}

func (b batch) part(span *pb.Span) []byte {
	return b.region[span.GetOffset() : span.GetOffset()+span.GetNumBytes()]
}

// integers returns the rows of a column [B, width] of integers or bools, in whichever layout it came.
func (b batch) integers(name string) [][]int64 {
	for _, spec := range b.Tensors {
		if spec.Name != name || len(spec.Shape) != 2 || spec.Shape[0] != b.NumRows || spec.Shape[1] > maxBytes/8/b.NumRows {
			continue
		}
		var values, starts, lengths []byte
		if spec.Data != nil {
			values = b.part(spec.Data)
		}
		isMask := spec.Layout == pb.Layout_LAYOUT_MASK
		if isMask || spec.Layout == pb.Layout_LAYOUT_RAGGED {
			spans := b.part(b.Spans[spec.SpanIndex])
			starts, lengths = spans[:4*b.NumRows], spans[4*b.NumRows:]
		} else if spec.Layout == pb.Layout_LAYOUT_POSITIONS {
			panic("this service reads no positions")
		}
		rows := make([][]int64, b.NumRows)
		for r := range rows {
			first, end := 0, int(spec.Shape[1]) // the held elements: all of DENSE, none of CONSTANT
			if starts != nil {
				first = int(binary.LittleEndian.Uint32(starts[4*r:]))
				end = first + int(binary.LittleEndian.Uint32(lengths[4*r:]))
			} else if spec.Layout == pb.Layout_LAYOUT_CONSTANT {
				end = 0
			}
			rows[r] = make([]int64, spec.Shape[1])
			for i := range rows[r] {
				switch {
				case i < first || i >= end:
					rows[r][i] = integer(spec.Fill)
				case isMask:
					rows[r][i] = 1
				default:
					size := sizes[spec.WireDtype]
					rows[r][i], values = integer(values[:size]), values[size:]
				}
			}
		}
		return rows
	}
	panic("needs column " + name + " [B, T]")
}

// integer reads a little-endian number. Types of fewer than 8 bytes are sent only for what is not negative, or int32.
func integer(data []byte) int64 {
	var word [8]byte
	copy(word[:], data)
	if len(data) == 4 {
		return int64(int32(binary.LittleEndian.Uint32(data)))
	}
	return int64(binary.LittleEndian.Uint64(word[:]))
}

// texts returns a column of texts, of which those that are dicts in Python are JSON.
func (b batch) texts(name string) *array.LargeString {
	reader, err := ipc.NewReader(bytes.NewReader(b.part(b.Columns)))
	if err != nil || !reader.Next() {
		panic(fmt.Sprint("the Arrow columns cannot be read: ", err))
	}
	for i, field := range reader.Schema().Fields() {
		if texts, ok := reader.RecordBatch().Column(i).(*array.LargeString); ok && field.Name == name && texts.Len() == int(b.NumRows) {
			return texts
		}
	}
	panic("needs column " + name)
}

// floats adds a column of float32 to a batch that is to be sent. Every part of a region starts on a multiple of 64.
func (b *batch) floats(name string, values []float32, shape ...uint64) {
	b.region = append(b.region, make([]byte, -len(b.region)&63)...)
	span := &pb.Span{Offset: uint64(len(b.region)), NumBytes: uint64(4 * len(values))}
	for _, value := range values {
		b.region = binary.LittleEndian.AppendUint32(b.region, math.Float32bits(value))
	}
	b.Tensors = append(b.Tensors, &pb.TensorSpec{Name: name, Dtype: pb.Dtype_DTYPE_FLOAT32, WireDtype: pb.Dtype_DTYPE_FLOAT32, Shape: shape, Layout: pb.Layout_LAYOUT_DENSE, Data: span})
	b.RegionBytes = uint64(len(b.region))
}
