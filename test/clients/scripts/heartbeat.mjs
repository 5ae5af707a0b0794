// Who streams gets signs of life while it waits, which the SDK passes over. What goes wrong after them is
// an error of the SDK's all the same. llm takes a second to load; whisper never gets ready.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import OpenAI from 'openai';
import { errorOf, hello, loaded, openai } from './site.mjs';

const client = openai();
const ask = { model: 'gpt-4o-mini', messages: hello, stream: true };

test('comment lines come while the model loads, then the events', async () => {
  const response = await client.chat.completions.create(ask).asResponse();
  assert.equal(response.status, 200);
  assert.match(response.headers.get('content-type'), /^text\/event-stream/);
  const text = await response.text();
  const [, comments, events] = /^((?::.*\n\n?)+)(data: [^]*)$/.exec(text) ?? assert.fail(text);
  assert.ok(comments.match(/^:/gm).length >= 3, comments);
  assert.doesNotMatch(events, /^:/m);
  assert.match(events, /data: \[DONE\]\n\n$/);
});

test('the SDK reads on past them', async () => {
  await client.chat.completions.create({ model: 'llama3.2', messages: hello });
  assert.deepEqual(await loaded(), ['ollama'], 'so that llm has to load again');
  let text = '';
  for await (const chunk of await client.chat.completions.create(ask)) text += chunk.choices[0].delta.content ?? '';
  assert.equal(text, 'llm answers: Hello, GPU.');
});

test('an error after them is thrown where the stream is read', async () => {
  const stream = await client.chat.completions.create({ ...ask, model: 'whisper-1' });
  const error = await errorOf(
    (async () => {
      for await (const chunk of stream) assert.fail(JSON.stringify(chunk));
    })(),
  );
  assert.ok(error instanceof OpenAI.APIError, error);
  assert.equal(error.type, 'gpu_broker_error');
  assert.equal(error.code, 'budget_exceeded');
  assert.match(error.message, /whisper/);
});
