// One chat through OpenAI's own SDK, told as JSON lines on stdout:
//
//   {"event":"chunk","time":…,"text":…,"finish_reason":…}   each piece of a streamed answer
//   {"event":"done","time":…,"chunks":…,"text":…,"finish_reason":…}
//   {"event":"error","time":…,"class":…,"status":…,"code":…,"type":…,"message":…,"retry_after":…,"body":…}
//
// time is in milliseconds since 1970. The last line is done (exit 0) or error (exit 1).
// A private certificate authority is trusted with Node's own NODE_EXTRA_CA_CERTS=FILE.
import { parseArgs } from 'node:util';
import OpenAI from 'openai';

const { values: options } = parseArgs({
  options: {
    'base-url': { type: 'string' }, // ends in /v1, or in whatever stands for it
    model: { type: 'string' },
    prompt: { type: 'string', default: 'hello' },
    'max-tokens': { type: 'string', default: '16' },
    temperature: { type: 'string' },
    seed: { type: 'string' },
    'max-retries': { type: 'string', default: '0' },
    'timeout-ms': { type: 'string', default: '120000' },
    header: { type: 'string', multiple: true, default: [] }, // Name: value
    whole: { type: 'boolean', default: false }, // one answer instead of a stream
  },
});

function tell(event, fields) {
  process.stdout.write(JSON.stringify({ event, time: Date.now(), ...fields }) + '\n');
}

function headers(lines) {
  return Object.fromEntries(
    lines.map((line) => {
      const colon = line.indexOf(':');
      if (colon < 1) throw new Error(`--header wants "Name: value", found ${JSON.stringify(line)}`);
      return [line.slice(0, colon).trim(), line.slice(colon + 1).trim()];
    }),
  );
}

async function chat() {
  const client = new OpenAI({
    baseURL: options['base-url'],
    apiKey: process.env.OPENAI_API_KEY ?? 'unused',
    maxRetries: Number(options['max-retries']),
    timeout: Number(options['timeout-ms']),
    defaultHeaders: headers(options.header),
  });
  const request = {
    model: options.model,
    messages: [{ role: 'user', content: options.prompt }],
    max_tokens: Number(options['max-tokens']),
  };
  if (options.temperature !== undefined) request.temperature = Number(options.temperature);
  if (options.seed !== undefined) request.seed = Number(options.seed);

  if (options.whole) {
    const answer = await client.chat.completions.create(request);
    const [choice] = answer.choices;
    return { chunks: 0, text: choice.message.content, finish_reason: choice.finish_reason };
  }

  let chunks = 0;
  let text = '';
  let finishReason = null;
  for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
    const [choice] = chunk.choices;
    const piece = choice?.delta?.content ?? '';
    chunks += 1;
    text += piece;
    finishReason = choice?.finish_reason ?? finishReason;
    tell('chunk', { text: piece, finish_reason: choice?.finish_reason ?? null });
  }
  // The SDK ends its loop quietly when the connection ends early.
  if (finishReason === null) throw new Error(`the stream ended without a finish_reason after ${chunks} chunks`);
  return { chunks, text, finish_reason: finishReason };
}

try {
  for (const needed of ['base-url', 'model']) {
    if (!options[needed]) throw new Error(`--${needed} is needed`);
  }
  tell('done', await chat());
} catch (error) {
  tell('error', {
    class: error.constructor.name,
    status: error.status ?? null,
    code: error.code ?? null,
    type: error.type ?? null,
    message: error.message,
    cause: error.cause ? String(error.cause) : null,
    retry_after: error.headers?.get?.('retry-after') ?? null,
    body: error.error ?? null,
  });
  process.exitCode = 1;
}
