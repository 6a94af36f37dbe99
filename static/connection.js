/**
 * One WebSocket that is kept up, whatever happens to it: it finds out that the other end is gone, asks why it was
 * refused, and comes back by itself where that helps.
 *
 * Knows of the protocol only what that takes: the first event, heartbeats, draining, close codes. What is said over it
 * is for `realtime.js`.
 */

/**
 * @typedef {object} Link  the connection, for people
 * @property {'idle' | 'connecting' | 'open' | 'waiting' | 'refused' | 'closed'} phase
 *   `waiting`: comes back by itself at `retryAt`; `refused` and `closed`: only when `connect` is called
 * @property {number} [status]  HTTP status of the refusal
 * @property {string} [code]
 * @property {string} [message]
 * @property {number} [retryAt]  ms since the epoch
 * @property {boolean} [again]  this try to connect follows on trouble that was told
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

/** A timer's id as a number, also where the platform gives an object. */
export function after(delay, run) {
  return /** @type {number} */ (/** @type {unknown} */ (setTimeout(run, delay)));
}

export class Connection {
  /** @type {Link} */
  link = { phase: 'idle' };

  #target;
  #key;
  #hear;
  #changed;
  /** @type {WebSocket | null} */
  #socket = null;
  #attempt = 0;
  #openedAt = 0;
  #heardAt = 0;
  #heartbeatMs = 15_000;
  /** The delay that a draining server asked for, in ms. @type {number | null} */
  #askedDelay = null;
  #timers = { retry: 0, connect: 0, silence: 0, pong: 0 };

  /**
   * @param {object} options
   * @param {(scheme: 'ws' | 'http') => URL} options.target  where to connect, and where to ask why that failed
   * @param {() => string | null} options.key  gives the API key; asked before each connection
   * @param {(event: any) => void} options.hear  gets each event of the server
   * @param {(link: Link) => void} options.changed
   */
  constructor({ target, key, hear, changed }) {
    this.#target = target;
    this.#key = key;
    this.#hear = hear;
    this.#changed = changed;
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
    socket.onmessage = current((event) => this.#take(JSON.parse(event.data)));
    socket.onclose = current((event) => void this.#lost(event.code));
    this.#timers.connect = after(CONNECT_TIMEOUT_MS, () => void this.#lost(1006));
  }

  /** Leave for good. */
  close() {
    this.#drop();
    this.#say({ phase: 'closed' });
  }

  /** Leave this socket and come back a little later. */
  comeBack() {
    this.#comeBack({});
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
      this.transmit({ type: 'ping', t: Date.now() });
      this.#timers.pong = after(PONG_TIMEOUT_MS, () => void this.#lost(1006));
    }
  }

  /** @returns {boolean} whether the event was given to a socket that is open; it may still be lost with it */
  transmit(event) {
    if (this.#socket?.readyState !== WebSocket.OPEN) return false;
    this.#socket.send(JSON.stringify(event));
    return true;
  }

  #take(event) {
    this.#heardAt = Date.now();
    clearTimeout(this.#timers.pong);
    this.#timers.pong = 0;
    if (event.type === 'session.created') this.#opened(event);
    if (event.type === 'server.draining') this.#askedDelay = event.retry_after_ms ?? null;
    this.#hear(event);
  }

  #opened(event) {
    clearTimeout(this.#timers.connect);
    this.#openedAt = Date.now();
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

  #say(link) {
    this.link = link;
    this.#changed(link);
  }
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
