// What Open WebUI asks for when it starts: the lists of both APIs, in the fields that it reads.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { get, loaded } from './site.mjs';

test('lists of models and the version, while nothing is loaded', async () => {
  const openai = await get('/v1/models');
  assert.equal(openai.object, 'list');
  for (const model of openai.data) {
    assert.equal(model.object, 'model');
    assert.equal(typeof model.id, 'string');
    assert.equal(typeof model.created, 'number');
    assert.equal(typeof model.owned_by, 'string');
  }
  const { models } = await get('/api/tags');
  for (const model of models) {
    assert.equal(typeof model.name, 'string');
    assert.equal(typeof model.model, 'string');
    assert.ok(!Number.isNaN(Date.parse(model.modified_at)), model.modified_at);
    assert.equal(typeof model.size, 'number');
    assert.equal(typeof model.digest, 'string');
  }
  assert.match((await get('/api/version')).version, /^\d+\.\d+/);
  assert.deepEqual((await get('/api/ps')).models, []);
  assert.deepEqual(await loaded(), []);
});
