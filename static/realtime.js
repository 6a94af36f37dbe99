/**
 * The client of the realtime protocol: one session over one WebSocket that is kept up, whatever happens to it.
 *
 * Knows no DOM and depends on nothing outside this folder. Use:
 *
 *     const client = new RealtimeClient({ url: 'ws://127.0.0.1:8000/v1/realtime' });
 *     client.on('text', (item) => ...);       // an item's text changed; `item.text` is all of it
 *     client.on('connection', (link) => ...); // what to tell the person about the connection
 *     client.connect();
 *     client.send('Hello');
 *
 * Events: those of `Conversation` (`items`, `item`, `text`, `answer`, `session`), `connection` (a Link), and `fault`
 * (`{code, message, text}`: the server refused something; `text` is the message that was not taken, if it was one).
 */

import { Conversation, countPoints, newId } from './conversation.js';

/**
 * @typedef {object} Link  the connection, for people
 * @property {'idle' | 'connecting' | 'open' | 'waiting' | 'refused' | 'closed'} phase
 *   `waiting`: comes back by itself at `retryAt`; `refused` and `closed`: only when `connect` is called
 * @property {number} [status]  HTTP status of the refusal
 * @property {string} [code]
 * @property {string} [message]
 * @property {number} [retryAt]  ms since the epoch
 * @property {boolean} [again]  this try to connect follows on trouble that was told
 *
 * @typedef {object} Unsent
 * @property {string} id  of the item
 * @property {string} text
 * @property {string} itemEvent  id of the event that creates the item
 * @property {string} askEvent  id of the event that asks for the answer
 * @property {boolean} itemRefused
 * @property {number} tries
 */

/** Close codes after which coming back by itself helps nobody. */
const STAY_AWAY = new Set([1000, 1002, 1003, 1007, 1009, 1010]);

const CONNECT_TIMEOUT_MS = 15_000;
/** How long an answer to `ping` may take before the connection counts as dead. */
const PONG_TIMEOUT_MS = 5_000;
/** Silence of so many heartbeat intervals means that the connection is dead: one lost, one late. */
const SILENCE = 2.5;
const FIRST_DELAY_MS = 400;
const LONGEST_DELAY_MS = 20_000;
/** A connection that lived so long has shown that the server is well: the next delay is a short one again. */
const STABLE_MS = 5_000;
const MOST_RETRIES_OF_A_MESSAGE = 5;

/**
 * Wait before the n-th try (from 0): doubles up to a bound, with jitter, so that clients do not come back in step.
 *
 * @param {number} attempt
 * @param {() => number} random
 */
export function backoff(attempt, random = Math.random) {
  return Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** attempt) * (0.5 + random() / 2);
}

/** Whether `key` can travel in the list of subprotocols (RFC 9110 token characters). */
export function isToken(key) {
  return /^[!#$%&'*+.^_`|~0-9A-Za-z-]+$/.test(key);
}

export class RealtimeClient {
  /** @type {Link} */
  link = { phase: 'idle' };
  conversation = new Conversation((change, subject) => this.#emit(change, subject));

  #url;
  #key;
  /** @type {string | null} */
  #sessionId;
  #model;
  /** @type {Map<string, Set<(subject: any) => void>>} */
  #listeners = new Map();
  /** @type {WebSocket | null} */
  #socket = null;
  #attempt = 0;
  #openedAt = 0;
  #heardAt = 0;
  #heartbeatMs = 15_000;
  /** The delay that a draining server asked for, in ms. @type {number | null} */
  #askedDelay = null;
  #timers = { retry: 0, connect: 0, silence: 0, pong: 0, resend: 0 };
  /** A message that the server has not begun to answer. @type {Unsent | null} */
  #unsent = null;
  /** The question that went with a message that was refused: its own refusal says nothing new. */
  #refusedAsk = '';
  #stopping = false;

  /**
   * @param {object} options
   * @param {string | URL} options.url  of the endpoint, `ws:` or `wss:`
   * @param {string | null} [options.sessionId]  a session to go on with; none: a new one
   * @param {string | null} [options.model]
   * @param {() => string | null} [options.key]  gives the API key; asked before each connection
   */
  constructor({ url, sessionId = null, model = null, key = () => null }) {
    this.#url = new URL(url);
    this.#sessionId = sessionId;
    this.#model = model;
    this.#key = key;
  }

  /** @returns {() => void} stops listening */
  on(type, listener) {
    const listeners = this.#listeners.get(type) ?? new Set();
    this.#listeners.set(type, listeners.add(listener));
    return () => listeners.delete(listener);
  }

  get sessionId() {
    return this.#sessionId;
  }

  /** Whether a message waits for its answer or an answer runs: the next one has to wait. */
  get busy() {
    return this.#unsent !== null || this.conversation.answer !== null;
  }

  /** Connect now, whatever the state: the first time, after a refusal, or because the person does not want to wait. */
  connect() {
    this.#drop();
    this.#say({ phase: 'connecting', again: this.link.phase === 'waiting' || this.link.again });
    const key = this.#key();
    const protocols = key ? ['realtime', `openai-insecure-api-key.${key}`] : ['realtime'];
    const socket = new WebSocket(this.#target('ws'), protocols);
    this.#socket = socket;
    this.#openedAt = 0;
    // A handler of a socket that was left behind must not touch the state of the next one.
    const current = (/** @type {(event: any) => void} */ handler) => (/** @type {any} */ event) => {
      if (socket === this.#socket) handler(event);
    };
    socket.onmessage = current((event) => this.#hear(event.data));
    socket.onclose = current((event) => void this.#lost(event.code));
    this.#timers.connect = after(CONNECT_TIMEOUT_MS, () => void this.#lost(1006));
  }

  /** Leave for good: the answer that runs goes on at the server. */
  close() {
    this.#drop();
    clearTimeout(this.#timers.resend);
    this.#say({ phase: 'closed' });
  }

  /**
   * Something happened that often kills connections unseen (the page was shown again, the network is back): find out
   * now and not after a time-out.
   */
  wake() {
    if (this.link.phase === 'waiting') {
      this.#attempt = 0;
      this.connect();
    } else if (this.link.phase === 'open' && !this.#timers.pong) {
      this.#transmit({ type: 'ping', t: Date.now() });
      this.#timers.pong = after(PONG_TIMEOUT_MS, () => void this.#lost(1006));
    }
  }

  /** Say something and ask for the answer. It is sent when the connection is there, again if that breaks. */
  send(text) {
    if (this.busy) throw new Error('An answer is under way: wait for its end or stop it.');
    const id = newId('item_');
    this.#unsent = { id, text, itemEvent: newId('evt_'), askEvent: newId('evt_'), itemRefused: false, tries: 0 };
    this.conversation.addPending(id, text);
    this.#emit('answer');
    this.#deliver();
  }

  /** Ask (again) for the answer to a message that has none. */
  ask(itemId) {
    const item = this.conversation.item(itemId);
    if (!item || this.busy) return;
    this.#unsent = { id: itemId, text: item.text, itemEvent: '', askEvent: newId('evt_'), itemRefused: false, tries: 0 };
    this.conversation.outcomes.delete(itemId);
    this.#emit('answer');
    this.#deliver();
  }

  /** Stop the answer at what was seen of it. `seen` counts code points. */
  stop(seen = null) {
    const { answer } = this.conversation;
    if (this.#stopping || !this.busy) return;
    if (this.link.phase !== 'open' || this.#timers.resend) {
      // Not asked yet, so nothing is there to be cancelled: take the question back.
      if (this.#isPending()) this.#giveBack('', '');
      return;
    }
    this.#stopping = true;
    const item = answer?.itemId ? this.conversation.item(answer.itemId) : undefined;
    /** @type {Record<string, unknown>} */
    const cancel = { type: 'response.cancel', event_id: newId('evt_') };
    if (answer) cancel.response_id = answer.id;
    if (item) cancel.seen = Math.min(seen ?? item.points, item.points);
    this.#transmit(cancel);
    this.#emit('answer');
  }

  /** Whether the server was asked to stop and has not said that it did. */
  get stopping() {
    return this.#stopping;
  }

  // The socket.

  #target(scheme) {
    const url = new URL(this.#url);
    if (scheme === 'http') url.protocol = url.protocol.replace('ws', 'http');
    url.searchParams.set('extensions', '1');
    url.searchParams.set('history', 'all');
    if (this.#sessionId) url.searchParams.set('session_id', this.#sessionId);
    if (this.#model) url.searchParams.set('model', this.#model);
    return url;
  }

  #hear(data) {
    this.#heardAt = Date.now();
    clearTimeout(this.#timers.pong);
    this.#timers.pong = 0;
    const event = JSON.parse(data);
    if (event.type === 'session.created') this.#opened(event);
    if (event.type === 'server.draining') this.#askedDelay = event.retry_after_ms ?? null;
    if (!this.conversation.apply(event)) {
      this.#comeBack({});
      return;
    }
    if (event.type === 'session.created') this.#deliver();
    if (event.type === 'response.created') this.#accepted(event);
    if (event.type === 'response.done') this.#stopped();
    if (event.type === 'error') this.#refused(event.error);
  }

  #opened(event) {
    clearTimeout(this.#timers.connect);
    this.#sessionId = event.session.id;
    this.#openedAt = Date.now();
    this.#stopping = false;
    this.#heartbeatMs = event.session.heartbeat_interval_ms || this.#heartbeatMs;
    this.#watchSilence();
    this.#say({ phase: 'open' });
  }

  /** A browser shows no ping and often no close: only silence tells that the other end is gone. */
  #watchSilence() {
    this.#timers.silence = after(this.#heartbeatMs / 2, () => {
      if (Date.now() - this.#heardAt > this.#heartbeatMs * SILENCE) void this.#lost(1006);
      else this.#watchSilence();
    });
  }

  async #lost(code) {
    const opened = this.#openedAt;
    this.#drop();
    if (opened && STAY_AWAY.has(code)) {
      this.#say({ phase: 'closed', code: String(code) });
    } else if (opened && code !== 1008) {
      this.#comeBack({});
    } else {
      this.#say({ phase: 'connecting', again: this.link.again });
      const probing = this.link;
      const verdict = await this.#probe();
      if (this.link !== probing) return; // meanwhile somebody called `connect` or `close`
      if (verdict.phase === 'refused') this.#say(verdict);
      else this.#comeBack(verdict);
    }
  }

  /** A browser sees a refused handshake as 1006 without a reason: ask the same address over HTTP for it. */
  async #probe() {
    const key = this.#key();
    try {
      const answer = await fetch(this.#target('http'), {
        headers: key ? { Authorization: `Bearer ${key}` } : {},
        cache: 'no-store',
        signal: AbortSignal.timeout(CONNECT_TIMEOUT_MS),
      });
      const body = await answer.json().catch(() => null);
      return readVerdict(answer.status, body?.error, answer.headers.get('Retry-After'), this.#attempt);
    } catch {
      return { phase: 'waiting', code: 'unreachable', message: 'The server cannot be reached.' };
    }
  }

  #comeBack(verdict) {
    this.#drop();
    if (this.#openedAt && Date.now() - this.#openedAt > STABLE_MS) this.#attempt = 0;
    const delay = Math.max(this.#askedDelay ?? backoff(this.#attempt), verdict.retryAfterMs ?? 0);
    this.#askedDelay = null;
    this.#attempt += 1;
    this.#timers.retry = after(delay, () => this.connect());
    const { code, message, status } = verdict;
    this.#say({ phase: 'waiting', status, code, message, retryAt: Date.now() + delay });
  }

  /** Let go of the socket and of all that waits for it. Its close may take minutes when the network is gone. */
  #drop() {
    const socket = this.#socket;
    this.#socket = null;
    for (const name of /** @type {const} */ (['retry', 'connect', 'silence', 'pong'])) {
      clearTimeout(this.#timers[name]);
      this.#timers[name] = 0;
    }
    if (socket && socket.readyState <= WebSocket.OPEN) socket.close();
  }

  #transmit(event) {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(event));
  }

  // The message that waits for its answer.

  #isPending() {
    return this.#unsent !== null && this.conversation.item(this.#unsent.id)?.pending === true;
  }

  /** Both events are harmless if the server had them: the item has our id, and one item has one answer. */
  #deliver() {
    const unsent = this.#unsent;
    clearTimeout(this.#timers.resend);
    this.#timers.resend = 0;
    if (!unsent || this.link.phase !== 'open') return;
    unsent.itemRefused = false;
    if (this.#isPending()) {
      const content = [{ type: 'input_text', text: unsent.text }];
      const item = { id: unsent.id, type: 'message', role: 'user', content };
      this.#transmit({ type: 'conversation.item.create', event_id: unsent.itemEvent, item });
    }
    this.#transmit({ type: 'response.create', event_id: unsent.askEvent, in_reply_to: unsent.id });
  }

  #accepted(event) {
    const unsent = this.#unsent;
    const inReplyTo = event.in_reply_to ?? event.response.in_reply_to;
    if (!unsent || (inReplyTo && inReplyTo !== unsent.id)) return;
    this.#unsent = null;
    this.#emit('answer');
  }

  #stopped() {
    this.#stopping = false;
    this.#emit('answer');
  }

  #refused(error) {
    const unsent = this.#unsent;
    const isAsk = error.event_id && error.event_id === (unsent?.askEvent ?? this.#refusedAsk);
    if (isAsk && (!unsent || unsent.itemRefused)) return; // follows from the refusal of its item, which was handled
    if (unsent && error.event_id === unsent.itemEvent) unsent.itemRefused = true;
    if (error.code === 'response_cancel_not_active') {
      this.#stopped();
    } else if (!unsent || !error.event_id || ![unsent.itemEvent, unsent.askEvent].includes(error.event_id)) {
      this.#emit('fault', { code: error.code, message: error.message, text: null });
    } else if (error.retryable && unsent.tries < MOST_RETRIES_OF_A_MESSAGE) {
      unsent.tries += 1;
      clearTimeout(this.#timers.resend);
      this.#timers.resend = after(error.retry_after_ms ?? backoff(unsent.tries), () => this.#deliver());
    } else if (this.#isPending()) {
      this.#giveBack(error.code, error.message);
    } else {
      this.#unsent = null;
      this.conversation.setOutcome(unsent.id, { status: 'failed', code: error.code, message: error.message });
    }
  }

  /** The message was not taken: out of the conversation, back to the person. */
  #giveBack(code, message) {
    const unsent = this.#unsent;
    if (!unsent) return;
    this.#unsent = null;
    this.#refusedAsk = unsent.askEvent;
    clearTimeout(this.#timers.resend);
    this.#timers.resend = 0;
    this.conversation.remove(unsent.id);
    this.#emit('fault', { code, message, text: unsent.text });
    this.#emit('answer');
  }

  #say(link) {
    this.link = link;
    this.#emit('connection', link);
  }

  #emit(type, subject) {
    for (const listener of this.#listeners.get(type) ?? []) listener(subject);
  }
}

/** A timer's id as a number, also where the platform gives an object. */
function after(delay, run) {
  return /** @type {number} */ (/** @type {unknown} */ (setTimeout(run, delay)));
}

/**
 * What an answer to the probe means for the next step.
 *
 * @param {number} status
 * @param {{code?: string, message?: string} | undefined} error
 * @param {string | null} retryAfter  seconds, as the header says them
 * @param {number} attempt  failed tries so far
 */
export function readVerdict(status, error, retryAfter, attempt) {
  const seconds = Number.parseFloat(retryAfter ?? '');
  const told = { status, code: error?.code ?? `http_${status}`, message: error?.message };
  if (status === 426) {
    // Let in by HTTP, yet no socket: at first a passing trouble, after some tries something in between.
    const blocked = attempt >= 2;
    const message = blocked
      ? 'The server answers, but no WebSocket gets through. A proxy in between may not forward the Upgrade header.'
      : undefined;
    return { phase: 'waiting', status, code: blocked ? 'no_upgrade' : 'interrupted', message };
  }
  if (status === 429 || status >= 500) {
    return { ...told, phase: 'waiting', retryAfterMs: Number.isFinite(seconds) ? seconds * 1000 : undefined };
  }
  return { ...told, phase: 'refused' };
}

export { Conversation, countPoints };
