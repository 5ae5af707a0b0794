// Ollama's own client through the same URL, while OpenAI's SDK takes the card away from it.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { counters, errorOf, hello, loaded, ollama, openai } from './site.mjs';

const client = ollama();

test('lists and the version come at once, and load nothing', async () => {
  const { models } = await client.list();
  for (const name of ['llama3.2', 'qwen2.5:7b', 'nomic-embed-text']) {
    assert.ok(models.some((model) => model.name === name || model.name === `${name}:latest`), `${name} is not in the list`);
  }
  assert.deepEqual((await client.ps()).models, []);
  assert.match((await client.version()).version, /^\d+\.\d+/);
  assert.deepEqual(await loaded(), []);
});

test('a chat, whole and streamed', async () => {
  const whole = await client.chat({ model: 'llama3.2', messages: hello });
  assert.equal(whole.message.role, 'assistant');
  assert.match(whole.message.content, /^ollama answers, /);
  let text = '';
  let pieces = 0;
  for await (const part of await client.chat({ model: 'llama3.2', messages: hello, stream: true })) {
    text += part.message.content;
    pieces++;
  }
  assert.equal(text, whole.message.content);
  assert.ok(pieces > 4, 'it was streamed');
  assert.deepEqual((await client.ps()).models.map((model) => model.name), ['llama3.2']);
  assert.deepEqual(await loaded(), ['ollama']);
});

test('generate and embed, after another model took the card', async () => {
  const { evictions } = await counters();
  const other = await openai().chat.completions.create({ model: 'gpt-4o-mini', messages: hello });
  assert.equal(other.choices[0].message.content, 'llm answers: Hello, GPU.');
  assert.deepEqual(await loaded(), ['llm']);
  assert.deepEqual((await client.ps()).models, [], 'ollama has unloaded, and says so while another has the card');

  const whole = await client.generate({ model: 'qwen2.5:7b', prompt: 'Why is the sky blue?' });
  assert.match(whole.response, /^ollama answers, /);
  let text = '';
  for await (const part of await client.generate({ model: 'qwen2.5:7b', prompt: 'Why?', stream: true })) text += part.response;
  assert.equal(text, whole.response);
  const { embeddings } = await client.embed({ model: 'nomic-embed-text', input: ['one', 'two'] });
  assert.deepEqual(embeddings.map((vector) => vector.length), [8, 8]);
  assert.deepEqual(await loaded(), ['ollama']);
  assert.equal((await counters()).evictions, evictions + 2);
});

test('both clients at once, again and again', async () => {
  const ask = { model: 'gpt-4o-mini', messages: hello };
  for (let round = 0; round < 3; round++) {
    const [chat, generated] = await Promise.all([
      openai().chat.completions.create(ask),
      client.generate({ model: 'llama3.2', prompt: 'Why?' }),
    ]);
    assert.match(chat.choices[0].message.content, /^llm answers/);
    assert.match(generated.response, /^ollama answers/);
  }
});

test('an unknown model is its client\'s own error, with our message', async () => {
  const { total_jobs: jobs } = await counters();
  for (const stream of [false, true]) {
    const error = await errorOf(client.chat({ model: 'llama3.3', messages: hello, stream }));
    assert.equal(error.name, 'ResponseError');
    assert.equal(error.status_code, 404);
    assert.match(error.message, /llama3\.3.*llama3\.2/s, 'it says what is near');
  }
  assert.equal((await counters()).total_jobs, jobs, 'nobody waited for the GPU');
});
