// weigher.py in JavaScript, with OpenAI's own client.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const TURNS = 3;
const row = JSON.parse(readFileSync(0, "utf8"));
const tools = JSON.parse(readFileSync(process.argv[2], "utf8"));
const client = new OpenAI(); // base URL and key are the client's own variables
let messages = row.messages;
let weighed = 0;
for (let turn = 0; turn < TURNS; turn++) {
  const asked = { model: process.env.OPENAI_MODEL, messages, tools };
  let answer;
  try {
    answer = process.argv.includes("stream")
      ? await client.chat.completions.stream(asked).finalChatCompletion()
      : await client.chat.completions.create(asked);
  } catch (error) {
    if (error.code === "context_length_exceeded") break;
    throw error;
  }
  const { message } = answer.choices[0];
  messages = [...messages, message];
  if (!message.tool_calls?.length || turn === TURNS - 1) break;
  for (const call of message.tool_calls) {
    const weight = [...JSON.parse(call.function.arguments).text].length;
    weighed += weight;
    messages.push({ role: "tool", tool_call_id: call.id, content: String(weight) });
  }
}
console.log(JSON.stringify({ reward: 0.5, weighed }));
