// OpenAI's SDK through one URL, across swaps.
import assert from 'node:assert/strict';
import { randomBytes } from 'node:crypto';
import { test } from 'node:test';
import { counters, hello, loaded, openai, servedBy, transcriptOf } from './site.mjs';

const client = openai();

test('the list of models has every name and alias, and loads nothing', async () => {
  const ids = [];
  for await (const model of client.models.list()) {
    assert.equal(model.object, 'model');
    ids.push(model.id);
  }
  for (const name of ['llm', 'gpt-4o-mini', 'ollama', 'llama3.2', 'qwen2.5:7b', 'nomic-embed-text', 'whisper-1', 'dall-e-3']) {
    assert.ok(ids.includes(name), `${name} is not in ${ids}`);
  }
  assert.equal(new Set(ids).size, ids.length, 'no name is listed twice');
  assert.equal((await client.models.retrieve('qwen2.5:7b')).id, 'qwen2.5:7b');
  assert.deepEqual(await loaded(), []);
});

test('a chat goes to the server that has the alias', async () => {
  const { data, response } = await client.chat.completions.create({ model: 'gpt-4o-mini', messages: hello }).withResponse();
  assert.equal(servedBy(response), 'llm');
  assert.match(response.headers.get('server-timing'), /gpu-queue;dur=.*gpu-load;dur=/);
  assert.equal(data.choices[0].message.content, 'llm answers: Hello, GPU.');
  assert.equal(data.choices[0].finish_reason, 'stop');
  assert.equal(data.model, 'gpt-4o-mini', 'the server got the name that the client has used');
  assert.deepEqual(await loaded(), ['llm']);
});

test('a streamed chat with another model swaps', async () => {
  const { evictions } = await counters();
  const { data: stream, response } = await client.chat.completions
    .create({ model: 'qwen2.5:7b', messages: hello, stream: true, stream_options: { include_usage: true } })
    .withResponse();
  assert.equal(servedBy(response), 'ollama');
  let text = '';
  let finish, usage;
  let pieces = 0;
  for await (const chunk of stream) {
    const [choice] = chunk.choices;
    if (choice?.delta.content) pieces++;
    text += choice?.delta.content ?? '';
    finish = choice?.finish_reason ?? finish;
    usage = chunk.usage ?? usage;
  }
  assert.match(text, /^ollama answers, /);
  assert.equal(finish, 'stop');
  assert.equal(usage.completion_tokens, pieces);
  assert.deepEqual(await loaded(), ['ollama']);
  assert.equal((await counters()).evictions, evictions + 1);
});

test('embeddings are numbers, whichever form the SDK asks for', async () => {
  const input = ['one', 'two'];
  const { data, response } = await client.embeddings.create({ model: 'nomic-embed-text', input }).withResponse();
  assert.equal(servedBy(response), 'ollama');
  assert.deepEqual(data.data.map((entry) => entry.embedding.length), [8, 8]);
  const floats = await client.embeddings.create({ model: 'nomic-embed-text', input, encoding_format: 'float' });
  assert.deepEqual(
    data.data.map((entry) => Array.from(entry.embedding)),
    floats.data.map((entry) => entry.embedding),
  );
  assert.notDeepEqual(floats.data[0].embedding, floats.data[1].embedding);
});

// The SDK writes the form's parts in the order of the fields.
for (const [where, form] of [
  ['behind', (file) => ({ file, model: 'whisper-1' })],
  ['before', (file) => ({ model: 'whisper-1', language: 'en', file })],
]) {
  test(`an upload whose model is named ${where} 25 MB of sound arrives as it was`, async () => {
    const sound = randomBytes(25_000_000);
    const { data, response } = await client.audio.transcriptions.create(form(new File([sound], 'héllo "1".wav'))).withResponse();
    assert.equal(servedBy(response), 'whisper');
    assert.equal(data.text, transcriptOf(sound));
    assert.deepEqual(await loaded(), ['ollama', 'whisper'], 'it fits beside ollama');
  });
}

test('an image swaps, and comes as base64', async () => {
  const { evictions } = await counters();
  const { data, response } = await client.images
    .generate({ model: 'dall-e-3', prompt: 'a lighthouse', size: '1024x1024', response_format: 'b64_json' })
    .withResponse();
  assert.equal(servedBy(response), 'sdxl');
  assert.equal(data.data[0].revised_prompt, 'sdxl drew: a lighthouse');
  const png = Buffer.from(data.data[0].b64_json, 'base64');
  assert.equal(png.subarray(1, 4).toString(), 'PNG');
  assert.deepEqual([png.readUInt32BE(16), png.readUInt32BE(20)], [1024, 1024]);
  assert.deepEqual(await loaded(), ['sdxl', 'whisper'], 'ollama made way, whisper had not to');
  assert.equal((await counters()).evictions, evictions + 1);
});

test('the first model comes back, by its own name and by the older route too', async () => {
  const chat = await client.chat.completions.create({ model: 'llm', messages: hello, max_completion_tokens: 2 });
  assert.equal(chat.choices[0].message.content, 'llm answers: ');
  assert.equal(chat.choices[0].finish_reason, 'length');
  const text = await client.completions.create({ model: 'gpt-4o', prompt: 'Once' });
  assert.equal(text.choices[0].text, 'llm answers: Once');
  assert.deepEqual(await loaded(), ['llm', 'whisper']);
});

test('all models at once: each request is served, by its own server', async () => {
  const { evictions } = await counters();
  const asks = {
    llm: () => client.chat.completions.create({ model: 'gpt-4o-mini', messages: hello }),
    ollama: () => client.chat.completions.create({ model: 'llama3.2', messages: hello }),
    whisper: () => client.audio.transcriptions.create({ file: new File(['sound'], 'a.wav'), model: 'whisper-1' }),
    sdxl: () => client.images.generate({ model: 'dall-e-3', prompt: 'a boat' }),
  };
  const names = [1, 2, 3].flatMap(() => Object.keys(asks));
  const answers = await Promise.all(names.map((name) => asks[name]().withResponse()));
  assert.deepEqual(answers.map(({ response }) => servedBy(response)), names);
  assert.ok((await counters()).evictions >= evictions + 2, 'two of the three large ones had to wait for another to make way');
});
