// What the scripts share: clients of the site in $SITE, and the broker's own word on what happened.
import assert from 'node:assert/strict';
import { createHash } from 'node:crypto';
import { once } from 'node:events';
import http from 'node:http';
import OpenAI from 'openai';
import { Ollama } from 'ollama';

const site = process.env.SITE;

/** OpenAI's SDK as anybody makes it; the scripts count requests, so it retries only where they say so. */
export const openai = (options) => new OpenAI({ baseURL: `${site}/v1`, apiKey: 'unused', maxRetries: 0, ...options });

/** Ollama's client as anybody makes it. */
export const ollama = () => new Ollama({ host: site });

export async function get(path) {
  const response = await fetch(site + path);
  assert.equal(response.status, 200, path);
  return response.json();
}

/** The broker's counters: evictions, loads, refused, … */
export const counters = async () => (await get('/gpu/status')).scheduler;

/** How many requests went to another consumer than the one that they asked for. */
export const fallbacks = async () => (await get('/gpu/decisions')).decisions.filter(({ kind }) => kind === 'fallback').length;

/** Unloads a consumer as an administrator does. Caddy's admin endpoint refuses fetch, whose headers are a browser's. */
export async function unload(consumer) {
  const request = http.request(`${process.env.ADMIN}/gpu_broker/consumers/${consumer}/unload`, { method: 'POST', agent: false });
  request.end();
  const [response] = await once(request, 'response');
  response.resume();
  await once(response, 'end');
  assert.equal(response.statusCode, 200);
}

/** Names of the consumers that are loaded, in order. */
export async function loaded() {
  const { consumers } = await get('/gpu/status');
  return Object.keys(consumers)
    .filter((name) => consumers[name].loaded)
    .sort();
}

/** The consumer that a response came from, by the broker's word and by the server's. */
export function servedBy(response) {
  const consumer = response.headers.get('x-gpu-broker-consumer');
  assert.equal(response.headers.get('x-modelserver'), consumer, 'the answer is the server\'s that the broker names');
  return consumer;
}

/** What the pretending whisper makes of a recording: it changes with every byte. */
export const transcriptOf = (sound) =>
  `whisper heard ${sound.length} bytes of sound, sha256 ${createHash('sha256').update(sound).digest('hex')}`;

/** The error that a promise is rejected with. */
export async function errorOf(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  assert.fail('it was answered without an error');
}

export const hello = [{ role: 'user', content: 'Hello, GPU.' }];
