// Ollama's own client at the same URL, while OpenAI's SDK takes the card and gives it back.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { counters, errorOf, fallbacks, hello, loaded, ollama, openai, unload } from './site.mjs';

const client = ollama();

/** A chat and a generation, whole and streamed. Each part must name the model as its server does. */
async function speaks(model, as, text) {
  for (const [ask, words] of [
    [(more) => client.chat({ model, messages: hello, ...more }), (part) => part.message.content],
    [(more) => client.generate({ model, prompt: 'Hello, GPU.', ...more }), (part) => part.response],
  ]) {
    const whole = await ask({ stream: false });
    assert.match(words(whole), text);
    assert.equal(whole.model, as);
    let all = '';
    let pieces = 0;
    for await (const part of await ask({ stream: true })) {
      assert.equal(part.model, as);
      all += words(part);
      pieces++;
    }
    assert.equal(all, words(whole));
    assert.ok(pieces > 3, 'it was streamed');
  }
}

const running = async () => (await client.ps()).models.map((model) => model.name).sort();

test('the list has names, aliases, and what the server lists, and what is shown of a model is the server\'s', async () => {
  const names = (await client.list()).models.map((model) => model.name);
  for (const name of ['gpt-4o-mini', 'llama3.2:3b', 'qwen2.5:7b', 'hf.co/org/vectors:Q8', 'gpt-4o', 'cloud-small']) {
    assert.ok(names.includes(name), `${name} is not in ${names}`);
  }
  for (const [model, from] of [['gpt-4o-mini', 'llama3.2:3b'], ['qwen2.5:7b', 'qwen2.5:7b'], ['Library/Qwen2.5:7B', 'qwen2.5:7b']]) {
    assert.equal((await client.show({ model })).modelfile, `FROM ${from}`);
  }
  assert.match((await client.version()).version, /^\d+\.\d+/);
  assert.deepEqual(await running(), []);
  assert.deepEqual(await loaded(), []);
});

test('an alias, and a model that only the list names', async () => {
  await speaks('gpt-4o-mini', 'llama3.2:3b', /^ollama answers, /);
  await speaks('qwen2.5:7b', 'qwen2.5:7b', /^ollama answers, /);
  const { embeddings, model } = await client.embed({ model: 'hf.co/org/vectors:Q8', input: ['one', 'two'] });
  assert.deepEqual(embeddings.map((vector) => vector.length), [8, 8]);
  assert.equal(model, 'hf.co/org/vectors:Q8');
  assert.deepEqual(await running(), ['hf.co/org/vectors:Q8', 'llama3.2:3b', 'qwen2.5:7b']);
  assert.equal(await fallbacks(), 0);
});

test('a model is given back by its alias', async () => {
  const answer = await client.generate({ model: 'gpt-4o-mini', keep_alive: 0 });
  assert.equal(answer.done_reason, 'unload');
  assert.deepEqual(await running(), ['hf.co/org/vectors:Q8', 'qwen2.5:7b']);
});

test('while the card is taken the cloud stands in, by its own names', async () => {
  const image = await openai().images.generate({ model: 'dall-e-3', prompt: 'a boat' });
  assert.equal(image.data[0].revised_prompt, 'sdxl drew: a boat');
  const { evictions, loads } = await counters();
  assert.deepEqual(await running(), ['sdxl']);
  await speaks('gpt-4o-mini', 'cloud-small', /^hosted\/cloud-small answers: Hello, GPU\.$/);
  await speaks('qwen2.5:7b', 'cloud-small', /^hosted\/cloud-small answers: Hello, GPU\.$/);
  assert.equal((await client.embed({ model: 'hf.co/org/vectors:Q8', input: 'one' })).model, 'cloud-vectors');
  assert.equal(await fallbacks(), 9);
  assert.equal((await client.show({ model: 'gpt-4o-mini' })).modelfile, 'FROM llama3.2:3b', 'what needs no GPU stays at home');
  assert.equal((await client.chat({ model: 'gpt-4o-mini', messages: [], keep_alive: 0 })).done_reason, 'unload', 'so does giving back');
  assert.deepEqual(await loaded(), ['sdxl']);
  assert.deepEqual([(await counters()).evictions, (await counters()).loads], [evictions, loads]);
  assert.equal(await fallbacks(), 9);
});

test('a name that nobody has is its client\'s own error, and unloads nothing', async () => {
  const { total_jobs: jobs, evictions } = await counters();
  for (const model of ['gpt-4o-mimi', 'qwen2.5:14b', 'me/qwen2.5:7b']) {
    for (const stream of [false, true]) {
      const error = await errorOf(client.chat({ model, messages: hello, stream }));
      assert.equal(error.name, 'ResponseError');
      assert.equal(error.status_code, 404);
      assert.ok(error.message.includes(model), error.message);
    }
  }
  assert.equal((await counters()).total_jobs, jobs);
  assert.equal((await counters()).evictions, evictions);
  assert.deepEqual(await loaded(), ['sdxl']);
});

test('once the card is free, ollama serves again', async () => {
  const before = await fallbacks();
  await unload('sdxl');
  await speaks('gpt-4o-mini', 'llama3.2:3b', /^ollama answers, /);
  assert.equal(await fallbacks(), before);
});
