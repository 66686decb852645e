// openai-node: its tool runner, and a stream.

import OpenAI from "openai";

import * as conversation from "./conversation.mjs";

const NAME = "openai-node";
const client = new OpenAI();

function history() {
  const messages = [{ role: "system", content: conversation.system(NAME) }];
  for (const [id, city, found] of conversation.EXAMPLES) {
    const call = { name: "weather", arguments: JSON.stringify({ city }) };
    messages.push(
      { role: "user", content: `What is the weather in ${city}?` },
      { role: "assistant", content: null, tool_calls: [{ id, type: "function", function: call }] },
      { role: "tool", tool_call_id: id, content: found },
      { role: "assistant", content: `${city}: ${found}.` },
    );
  }
  return [...messages, { role: "user", content: conversation.QUESTION }];
}

async function useTool() {
  const runner = client.chat.completions.runTools({
    model: conversation.MODEL,
    messages: history(),
    max_tokens: conversation.MAX_TOKENS,
    temperature: 0,
    tools: [
      {
        type: "function",
        function: {
          name: "weather",
          description: conversation.TOOL_DESCRIPTION,
          parse: JSON.parse,
          function: conversation.weather,
          parameters: { type: "object", properties: { city: { type: "string" } } },
        },
      },
    ],
  });
  return await runner.finalContent();
}

async function stream() {
  const messages = [];
  const seen = [];
  for (const turn of conversation.turns(NAME)) {
    messages.push({ role: "user", content: turn });
    const chunks = await client.chat.completions.create({
      model: conversation.MODEL,
      messages,
      max_tokens: conversation.MAX_TOKENS,
      temperature: 0,
      stream: true,
    });
    const pieces = [];
    for await (const chunk of chunks) pieces.push(chunk.choices[0]?.delta.content ?? "");
    messages.push({ role: "assistant", content: pieces.join("") });
    seen.push(pieces);
  }
  return seen;
}

conversation.report(await useTool(), await stream());
