// A reward service in TypeScript, which a run can use in place of `rolemesh serve reward`. It loads the .proto files at
// start. A request is one batch: a header that describes its columns (frame.proto), and a region of bytes that has
// their values in layouts (data.proto).
import { loadPackageDefinition, Server, ServerCredentials, status, type ServerDuplexStream } from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { tableFromIPC } from "apache-arrow";
import { HealthImplementation } from "grpc-health-check";

type Span = { offset: number; numBytes: number } | null;
type Values = { wireDtype: Dtype; layout: string; data: Span; spanIndex: number; fill: Buffer };
type Column = Values & { name: string; shape: number[] };
type Header = { tensors: Column[]; columns: Span; spans: Span[] };
type Batch = { header: Header; region: ArrayBuffer };
type Frame = { header: Header | null; payload: Buffer }; // only the first frame of a batch has a header

/** The types that integers and bools are sent in. An id of a token is always below 2^31. */
const ARRAYS = { DTYPE_BOOL: Uint8Array, DTYPE_UINT8: Uint8Array, DTYPE_UINT16: Uint16Array, DTYPE_INT32: Int32Array };
type Dtype = keyof typeof ARRAYS;

async function computeScores(call: ServerDuplexStream<Frame, object>): Promise<void> {
  try {
    const frames: Frame[] = [];
    for await (const frame of call.iterator({ destroyOnReturn: false })) frames.push(frame); // the answer uses it too
    const region = Buffer.concat(frames.map((frame) => frame.payload));
    call.write(score({ header: frames[0].header!, region: new Uint8Array(region).buffer }));
    call.end();
  } catch (error: any) {
    call.emit("error", { code: status.INVALID_ARGUMENT, details: error.message, ...error }); // an error may have a code
  }
}

/** Scores an answer 1 if the text after #### is its row's ground truth, else 0. */
function score(request: Batch): object {
  const responses = integers(request, "responses"), masks = integers(request, "response_mask"); // [B, T]
  const texts = tableFromIPC(numbers(request, "DTYPE_UINT8", request.header.columns)); // dicts of Python are JSON
  const B = responses.length, T = responses[0].length;
  const begin = Math.ceil((B * T) / 16) * 16; // each part of a region begins at a multiple of 64 bytes
  const values = new Float32Array(begin + B); // token_level_scores [B, T], then acc [B]
  responses.forEach((tokens, row) => {
    const text = tokens.filter((_, i) => masks[row][i]).map(character).join("");
    const { ground_truth } = JSON.parse(texts.getChild("reward_model")!.get(row));
    if (!ground_truth) {
      const details = `row ${texts.getChild("uid")!.get(row)} has no ground_truth`;
      throw Object.assign(new Error(details), { code: status.FAILED_PRECONDITION });
    }
    if (text.split("####")[1]?.trim() === ground_truth) {
      values[row * T + masks[row].lastIndexOf(1)] = values[begin + row] = 1; // the reward comes with the last token
    }
  });
  console.log(`scored ${B} answers`);
  const dense = { dtype: "DTYPE_FLOAT32", wireDtype: "DTYPE_FLOAT32", layout: "LAYOUT_DENSE" };
  const tensors = [
    { ...dense, name: "token_level_scores", shape: [B, T], data: { offset: 0, numBytes: 4 * B * T } },
    { ...dense, name: "acc", shape: [B], data: { offset: 4 * begin, numBytes: 4 * B } },
  ];
  const header = { numRows: B, tensors, metaJson: "{}", regionBytes: values.byteLength };
  return { header, payload: Buffer.from(values.buffer) };
}

/** Decodes a token of the demo's tokenizer. Ids 0 to 93 are the visible ASCII characters, in order. */
function character(token: number): string {
  return token < 94 ? String.fromCharCode(33 + token) : " ";
}

/** Returns a column [B, T]. A row has values of its own on one span of elements, and the column's fill elsewhere. */
function integers(batch: Batch, name: string): number[][] {
  const column = batch.header.tensors.find((each) => each.name === name)!;
  const [rows, width] = column.shape, values = numbers(batch, column.wireDtype, column.data);
  const spans = numbers(batch, "DTYPE_INT32", batch.header.spans[column.spanIndex]); // starts, then lengths
  const fill = column.fill.reduceRight((number, byte) => 256 * number + byte, 0); // little-endian
  let taken = 0;
  const next = () => values[taken++];
  return Array.from({ length: rows }, (_, row) => {
    const start = spans[row], end = start + spans[rows + row];
    switch (column.layout) {
      case "LAYOUT_DENSE": return Array.from({ length: width }, next);
      case "LAYOUT_CONSTANT": return Array(width).fill(fill);
      case "LAYOUT_MASK": return Array(width).fill(0).fill(1, start, end);
      case "LAYOUT_RAGGED": return Array.from({ length: width }, (_, i) => (i < start || i >= end ? fill : next()));
      default: throw new Error(`column ${name} has the layout ${column.layout}`);
    }
  });
}

/** Returns the numbers that are in a part of the region. */
function numbers({ region }: Batch, dtype: Dtype, span: Span) {
  const array = ARRAYS[dtype];
  return new array(region, span?.offset ?? 0, (span?.numBytes ?? 0) / array.BYTES_PER_ELEMENT);
}

const [protos, address] = process.argv.slice(2);
const options = { includeDirs: [protos], enums: String, longs: Number, defaults: true };
const contract = loadPackageDefinition(loadSync("rolemesh/v1/reward.proto", options)) as any;
const server = new Server();
server.addService(contract.rolemesh.v1.RewardService.service, { computeScores });
new HealthImplementation({ reward: "SERVING" }).addToServer(server); // the controller waits for this name
server.bindAsync(address, ServerCredentials.createInsecure(), (error) => {
  if (error) throw error;
});
