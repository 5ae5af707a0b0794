// The SDK's own retries wait for as long as the broker says. llm's first two loads fail: after the first the
// broker waits 1 s before it tries again, after the second 2 s, and says so.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import OpenAI from 'openai';
import { counters, errorOf, hello, openai } from './site.mjs';

const ask = { model: 'gpt-4o-mini', messages: hello };

test('without retries the refusal is the user\'s', async () => {
  const error = await errorOf(openai().chat.completions.create({ ...ask, stream: true }));
  assert.ok(error instanceof OpenAI.InternalServerError, error);
  assert.equal(error.status, 503);
  assert.equal(error.code, 'load_failed');
  assert.match(error.message, /out of memory/);
  assert.equal(error.headers.get('retry-after'), '1');
});

test('with retries the request comes again when it was told to, and is served', async () => {
  const { refused } = await counters();
  const began = performance.now();
  const { data, response } = await openai({ maxRetries: 2 }).chat.completions.create(ask).withResponse();
  const took = performance.now() - began;
  assert.equal(data.choices[0].message.content, 'llm answers: Hello, GPU.');
  assert.equal((await counters()).refused, refused + 1);
  // By itself the SDK would have come again within half a second, and the broker would have kept it waiting.
  assert.ok(took > 2000, `it took ${took} ms`);
  const queued = Number(/gpu-queue;dur=([\d.]+)/.exec(response.headers.get('server-timing'))[1]);
  assert.ok(queued < 1000, `it was queued for ${queued} ms`);
});
