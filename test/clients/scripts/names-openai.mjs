// OpenAI's SDK at one URL at which no server is asked by the name that the client uses: aliases, models that only their
// server's list names, and a cloud that stands in, with names of its own, while the card is taken.
import assert from 'node:assert/strict';
import { randomBytes } from 'node:crypto';
import { test } from 'node:test';
import OpenAI from 'openai';
import { counters, errorOf, fallbacks, hello, loaded, openai, servedBy, transcriptOf, unload } from './site.mjs';

const client = openai();
const said = (who) => `${who} answers: Hello, GPU.`;
const ollamas = /^ollama answers, /;

/** The same chat three ways: whole, streamed, and by the SDK's own helper for streams. Each must name the model as its server does. */
async function chats(model, consumer, as, text) {
  const check = (got, response) => {
    if (response) assert.equal(servedBy(response), consumer, model);
    if (text instanceof RegExp) assert.match(got.text, text);
    else assert.equal(got.text, text);
    assert.deepEqual(got.models, [as]);
  };
  const { data, response } = await client.chat.completions.create({ model, messages: hello }).withResponse();
  check({ text: data.choices[0].message.content, models: [data.model] }, response);
  assert.ok(Number(response.headers.get('content-length')) > 0);
  assert.match(response.headers.get('server-timing'), /gpu-queue;dur=.*gpu-load;dur=/);

  const streamed = await client.chat.completions.create({ model, messages: hello, stream: true }).withResponse();
  const got = { text: '', models: new Set() };
  for await (const chunk of streamed.data) {
    got.text += chunk.choices[0]?.delta.content ?? '';
    got.models.add(chunk.model);
  }
  check({ ...got, models: [...got.models] }, streamed.response);

  const helper = client.chat.completions.stream({ model, messages: hello });
  const whole = await helper.finalChatCompletion();
  check({ text: whole.choices[0].message.content, models: [whole.model] });
}

async function vectors(model, consumer, as) {
  const input = ['one', 'two'];
  const { data, response } = await client.embeddings.create({ model, input }).withResponse();
  assert.equal(servedBy(response), consumer);
  assert.equal(data.model, as);
  const floats = await client.embeddings.create({ model, input, encoding_format: 'float' });
  assert.deepEqual(
    data.data.map((entry) => Array.from(entry.embedding)),
    floats.data.map((entry) => entry.embedding),
  );
}

/** An upload with the model's name before and behind a file that does not fit into memory buffers, and one whose answer is streamed. */
async function transcriptions(model, consumer) {
  const sound = randomBytes(3_000_000);
  const file = new File([sound], 'héllo "1".wav');
  const text = transcriptOf(sound).replace('whisper', consumer);
  for (const form of [{ file, model }, { model, language: 'en', file }]) {
    const { data, response } = await client.audio.transcriptions.create(form).withResponse();
    assert.equal(servedBy(response), consumer);
    assert.equal(data.text, text);
  }
  const { data: events, response } = await client.audio.transcriptions.create({ file, model, stream: true }).withResponse();
  assert.equal(servedBy(response), consumer);
  let deltas = '';
  let done;
  for await (const event of events) {
    if (event.type === 'transcript.text.delta') deltas += event.delta;
    else done = event.text;
  }
  assert.equal(deltas, text);
  assert.equal(done, text);
}

test('the list has names, aliases, and what ollama lists, and loads nothing', async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.deepEqual(ids.sort(), [
    'Systran/faster-whisper-small',
    'cloud-large',
    'cloud-small',
    'dall-e-3',
    'gpt-4o',
    'gpt-4o-mini',
    'hf.co/org/vectors:Q8',
    'hosted',
    'llama3.2:3b',
    'llm',
    'qwen2.5:7b',
    'sdxl',
    'whisper-1',
  ]);
  for (const id of ids) assert.equal((await client.models.retrieve(id)).id, id);
  assert.ok((await errorOf(client.models.retrieve('gpt-4o-mimi'))) instanceof OpenAI.NotFoundError);
  assert.deepEqual(await loaded(), []);
});

test('an alias of one of ollama\'s models is asked for by the model\'s own name', () => chats('gpt-4o-mini', 'ollama', 'llama3.2:3b', ollamas));

test('a model that only ollama\'s list names is asked for by it', async () => {
  await chats('qwen2.5:7b', 'ollama', 'qwen2.5:7b', ollamas);
  await chats('Library/Qwen2.5:7B', 'ollama', 'Library/Qwen2.5:7B', ollamas); // as the client spells it: ollama knows that, too
  await vectors('hf.co/org/vectors:Q8', 'ollama', 'hf.co/org/vectors:Q8');
  assert.deepEqual(await loaded(), ['ollama']);
});

test('a server that knows one name only gets that', async () => {
  await chats('gpt-4o', 'llm', 'tuned-7b', said('llm'));
  await chats('llm', 'llm', 'tuned-7b', said('llm'));
});

test('an upload by an alias arrives as it was', () => transcriptions('whisper-1', 'speech'));

test('while the card has room, nothing of this went to the cloud', async () => {
  assert.equal(await fallbacks(), 0);
  assert.equal((await counters()).evictions, 0);
  assert.deepEqual(await loaded(), ['llm', 'ollama', 'speech']);
});

test('what takes the whole card has no other to stand in for it', async () => {
  const { data, response } = await client.images.generate({ model: 'dall-e-3', prompt: 'a lighthouse' }).withResponse();
  assert.equal(servedBy(response), 'sdxl');
  assert.equal(data.data[0].revised_prompt, 'sdxl drew: a lighthouse');
  assert.deepEqual(await loaded(), ['sdxl']);
});

test('a name that nobody has is not found, and neither loads, unloads nor goes to the cloud', async () => {
  const before = await counters();
  for (const [model, near] of [
    ['gpt-4o-mimi', /did you mean "gpt-4o-mini"/],
    ['qwen2.5:14b', /did you mean "qwen2\.5:7b"/],
    ['whisper-2', /did you mean "whisper-1"/],
    ['tuned-7b', /"tuned-7b"/], // only servers go by these two
    ['cloud-vectors', /"cloud-vectors"/],
  ]) {
    for (const ask of [
      () => client.chat.completions.create({ model, messages: hello }),
      () => client.chat.completions.create({ model, messages: hello, stream: true }),
      () => client.embeddings.create({ model, input: 'one' }),
      () => client.audio.transcriptions.create({ model, file: new File(['sound'], 'a.wav') }),
    ]) {
      const error = await errorOf(ask());
      assert.ok(error instanceof OpenAI.NotFoundError, `${model}: ${error}`);
      assert.equal(error.type, 'gpu_broker_error');
      assert.equal(error.code, 'unknown_model');
      assert.match(error.message, near);
    }
  }
  assert.deepEqual(await counters(), { ...before, refused: (await counters()).refused });
  assert.deepEqual(await loaded(), ['sdxl']);
  assert.equal(await fallbacks(), 0);
});

test('while the card is taken the cloud stands in, by its own names', async () => {
  const { evictions, loads } = await counters();
  await chats('gpt-4o-mini', 'hosted', 'cloud-small', said('hosted/cloud-small'));
  await chats('llama3.2:3b', 'hosted', 'cloud-small', said('hosted/cloud-small'));
  await chats('gpt-4o', 'hosted', 'cloud-large', said('hosted/cloud-large'));
  await chats('llm', 'hosted', 'cloud-large', said('hosted/cloud-large'));
  assert.equal(await fallbacks(), 12);
  await transcriptions('whisper-1', 'hosted');
  await transcriptions('Systran/faster-whisper-small', 'hosted');
  assert.equal(await fallbacks(), 18);
  const { data, response } = await client.responses.create({ model: 'gpt-4o', input: 'Hello, GPU.' }).withResponse();
  assert.equal(servedBy(response), 'hosted');
  assert.equal(data.model, 'cloud-large');
  assert.deepEqual(await loaded(), ['sdxl']);
  assert.deepEqual([(await counters()).evictions, (await counters()).loads], [evictions, loads]);
});

test('the cloud stands in for models that only ollama\'s list names, however they are spelled', async () => {
  const before = await fallbacks();
  await chats('qwen2.5:7b', 'hosted', 'cloud-small', said('hosted/cloud-small'));
  await chats('Library/Qwen2.5:7B', 'hosted', 'cloud-small', said('hosted/cloud-small'));
  await vectors('hf.co/org/vectors:Q8', 'hosted', 'cloud-vectors');
  await vectors('gpt-4o-mini', 'hosted', 'cloud-vectors');
  assert.equal(await fallbacks(), before + 10);
  assert.deepEqual(await loaded(), ['sdxl']);
});

test('who asks for the cloud by one of its names gets that, and no fallback is counted', async () => {
  const before = await fallbacks();
  await chats('cloud-small', 'hosted', 'cloud-small', said('hosted/cloud-small'));
  await chats('cloud-large', 'hosted', 'cloud-large', said('hosted/cloud-large'));
  assert.equal(await fallbacks(), before);
});

test('an error of the cloud is the SDK\'s own, with the cloud\'s message, and nobody else is asked', async () => {
  const { evictions } = await counters();
  const error = await errorOf(client.completions.create({ model: 'gpt-4o', prompt: 'Once' })); // it is told to answer 429
  assert.ok(error instanceof OpenAI.RateLimitError, error);
  assert.equal(servedBy({ headers: error.headers }), 'hosted');
  assert.match(error.message, /told to fail/);
  assert.equal((await counters()).evictions, evictions);
});

test('once the card is free, the servers at home serve again', async () => {
  const before = await fallbacks();
  await unload('sdxl');
  await chats('gpt-4o-mini', 'ollama', 'llama3.2:3b', ollamas);
  await chats('gpt-4o', 'llm', 'tuned-7b', said('llm'));
  await transcriptions('whisper-1', 'speech');
  await vectors('hf.co/org/vectors:Q8', 'ollama', 'hf.co/org/vectors:Q8');
  assert.equal(await fallbacks(), before);
});

test('all at once: each request is answered by one that was asked by a name that it knows', async () => {
  const speaks = { 'gpt-4o-mini': 'llama3.2:3b', 'qwen2.5:7b': 'qwen2.5:7b', 'gpt-4o': 'tuned-7b', 'hf.co/org/vectors:Q8': 'hf.co/org/vectors:Q8' };
  const home = { 'gpt-4o': 'llm', 'whisper-1': 'speech', 'dall-e-3': 'sdxl' };
  const away = { 'gpt-4o': 'cloud-large', 'hf.co/org/vectors:Q8': 'cloud-vectors' };
  const asks = {
    'dall-e-3': (model) => client.images.generate({ model, prompt: 'a boat' }),
    'whisper-1': (model) => client.audio.transcriptions.create({ model, file: new File(['sound'], 'a.wav') }),
    'hf.co/org/vectors:Q8': (model) => client.embeddings.create({ model, input: 'one' }),
  };
  const models = [1, 2, 3].flatMap(() => ['dall-e-3', 'gpt-4o-mini', 'qwen2.5:7b', 'gpt-4o', 'whisper-1', 'hf.co/org/vectors:Q8']);
  await Promise.all(
    models.map(async (model) => {
      const ask = asks[model] ?? (() => client.chat.completions.create({ model, messages: hello }));
      const { data, response } = await ask(model).withResponse();
      const consumer = servedBy(response);
      if (model === 'dall-e-3' || consumer !== 'hosted') assert.equal(consumer, home[model] ?? 'ollama');
      if (data.model) assert.equal(data.model, consumer === 'hosted' ? (away[model] ?? 'cloud-small') : speaks[model]);
    }),
  );
});
