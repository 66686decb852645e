// Vercel AI SDK: generateText with a tool, streamText.

import { openai } from "@ai-sdk/openai";
import { generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

import * as conversation from "./conversation.mjs";

const NAME = "the AI SDK";
const SETTINGS = {
  // Not the Responses API, its default: that one counts on the server keeping earlier replies.
  model: openai.chat(conversation.MODEL),
  maxOutputTokens: conversation.MAX_TOKENS,
  temperature: 0,
};

function history() {
  const messages = [];
  for (const [toolCallId, city, found] of conversation.EXAMPLES) {
    const about = { toolCallId, toolName: "weather" };
    const output = { type: "text", value: found };
    messages.push(
      { role: "user", content: `What is the weather in ${city}?` },
      { role: "assistant", content: [{ type: "tool-call", ...about, input: { city } }] },
      { role: "tool", content: [{ type: "tool-result", ...about, output }] },
      { role: "assistant", content: `${city}: ${found}.` },
    );
  }
  return [...messages, { role: "user", content: conversation.QUESTION }];
}

async function useTool() {
  const { text } = await generateText({
    ...SETTINGS,
    system: conversation.system(NAME),
    messages: history(),
    stopWhen: isStepCount(4),
    tools: {
      weather: tool({
        description: conversation.TOOL_DESCRIPTION,
        inputSchema: z.object({ city: z.string() }),
        execute: conversation.weather,
      }),
    },
  });
  return text;
}

async function stream() {
  const messages = [];
  const seen = [];
  for (const turn of conversation.turns(NAME)) {
    messages.push({ role: "user", content: turn });
    const result = streamText({ ...SETTINGS, messages });
    const pieces = [];
    for await (const piece of result.textStream) pieces.push(piece);
    messages.push(...(await result.response).messages);
    seen.push(pieces);
  }
  return seen;
}

conversation.report(await useTool(), await stream());
