// What every client is made to say, and what it reports: nothing here knows of Pawl.
// The same conversation as ../scenarios/conversation.py holds.

export const MODEL = "calculator";
export const MAX_TOKENS = 16;
export const QUESTION = "What is the weather in Lima?";
export const TOOL_DESCRIPTION = "The weather in a city.";
export const EXAMPLES = [
  ["call_0", "Paris", "rain"],
  ["call_1", "Oslo", "snow"],
];

const ran = [];

export function weather({ city }) {
  ran.push(city);
  return "sunny";
}

export function system(client) {
  return `You help users of ${client}. Use the weather tool.`;
}

export function turns(client) {
  return [`Hello, I use ${client}.`, "And what did I just tell you?"];
}

export function report(answer, streamed) {
  console.log(JSON.stringify({ ran, answer, streamed }));
}
