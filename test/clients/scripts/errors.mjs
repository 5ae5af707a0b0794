// Each refusal is the SDK's own typed error, and says why in our words. The card is too small for llm,
// whisper takes longer to load than a request may wait, and ollama is down.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import OpenAI from 'openai';
import { counters, errorOf, hello, loaded, openai } from './site.mjs';

const client = openai();
const chat = (model) => errorOf(client.chat.completions.create({ model, messages: hello }));

function check(error, kind, status, code, message) {
  assert.ok(error instanceof kind, `want ${kind.name}, found ${error.constructor.name}: ${error.message}`);
  assert.equal(error.status, status);
  assert.equal(error.type, 'gpu_broker_error');
  assert.equal(error.code, code);
  assert.match(error.message, message);
}

test('an unknown model is not found, and the message says what is near', async () => {
  const error = await chat('gpt-4o-mimi');
  check(error, OpenAI.NotFoundError, 404, 'unknown_model', /gpt-4o-mimi.*gpt-4o-mini/s);
});

test('a request without a model is a bad one', async () => {
  check(await chat(undefined), OpenAI.BadRequestError, 400, 'bad_request', /model/);
});

test('a model that never fits can\'t be processed', async () => {
  const error = await chat('gpt-4o-mini');
  check(error, OpenAI.UnprocessableEntityError, 422, 'never_fits', /llm/);
  assert.equal(error.error.consumer, 'llm');
  assert.ok(error.error.detail.need > 10 * 2 ** 30);
});

test('a server that is down is an internal error that says when to come again', async () => {
  const error = await chat('llama3.2');
  check(error, OpenAI.InternalServerError, 503, 'unhealthy', /ollama/);
  const seconds = Number(error.headers.get('retry-after'));
  assert.ok(seconds >= 1 && seconds <= 60, `Retry-After ${seconds}`);
  assert.equal(error.error.retry_after, seconds);
});

test('a wait beyond the budget is an internal error', async () => {
  const error = await errorOf(client.audio.transcriptions.create({ file: new File(['sound'], 'a.wav'), model: 'whisper-1' }));
  check(error, OpenAI.InternalServerError, 504, 'budget_exceeded', /whisper/);
});

test('nothing of it made anybody unload', async () => {
  assert.equal((await counters()).evictions, 0);
  assert.deepEqual(await loaded(), []);
});
