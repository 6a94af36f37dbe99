/** Asks the server how its engines are, as long as there is something to wait for. */

/**
 * @typedef {object} Ready
 * @property {boolean} ready
 * @property {'up' | 'down'} store
 * @property {{name: string, state: 'starting' | 'healthy' | 'unhealthy', detail: string, models: string[]}[]} engines
 * @property {boolean} simulated
 */

const INTERVAL_MS = 1000;

export class Readiness {
  /** @type {Ready | null} the last answer */
  state = null;

  #url;
  #changed;
  #timer = 0;
  #asking = false;

  /**
   * @param {URL} url
   * @param {(state: Ready) => void} changed
   */
  constructor(url, changed) {
    this.#url = url;
    this.#changed = changed;
  }

  /** Ask now, and again each second until the server is ready. */
  async ask() {
    if (this.#asking) return;
    this.#asking = true;
    clearTimeout(this.#timer);
    try {
      const answer = await fetch(this.#url, { cache: 'no-store', signal: AbortSignal.timeout(5000) });
      this.state = await answer.json();
      if (this.state?.engines) this.#changed(this.state);
    } catch {
      // Unreachable or not ours: the connection's own trouble says so.
    } finally {
      this.#asking = false;
    }
    if (this.state?.ready === false) this.#timer = window.setTimeout(() => void this.ask(), INTERVAL_MS);
  }
}
