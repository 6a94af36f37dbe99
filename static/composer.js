/** The message field: grows with its text, Enter sends, Escape stops. */

/** A text of so many characters fills the field, which has its greatest height in the style sheet. */
const LONG = 4000;

export class Composer {
  #form = /** @type {HTMLFormElement} */ (document.getElementById('composer'));
  #input = /** @type {HTMLTextAreaElement} */ (document.getElementById('input'));
  #send = /** @type {HTMLButtonElement} */ (document.getElementById('send'));
  #stop = /** @type {HTMLButtonElement} */ (document.getElementById('stop'));
  #busy = false;
  #onSend;
  #onStop;

  /**
   * @param {object} actions
   * @param {(text: string) => void} actions.send
   * @param {() => void} actions.stop
   */
  constructor({ send, stop }) {
    this.#onSend = send;
    this.#onStop = stop;
    this.#form.addEventListener('submit', (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.#input.addEventListener('keydown', (event) => this.#key(event));
    this.#input.addEventListener('input', () => this.#changed());
    this.#stop.addEventListener('click', () => {
      this.#onStop();
      this.focus();
    });
    document.addEventListener('keydown', (event) => {
      if (event.key === 'Escape' && this.#busy && !event.isComposing) {
        event.preventDefault();
        this.#onStop();
      }
    });
    this.#changed();
  }

  focus() {
    this.#input.focus({ preventScroll: true });
  }

  /** Put a text back that was not taken, unless the person has begun another. */
  restore(text) {
    if (!this.#input.value) this.#input.value = text;
    this.#changed();
    this.focus();
  }

  /** @param {boolean} busy  an answer is under way: the button stops it */
  setBusy(busy) {
    if (busy === this.#busy) return;
    const focused = document.activeElement === this.#send || document.activeElement === this.#stop;
    this.#busy = busy;
    this.#send.hidden = busy;
    this.#stop.hidden = !busy;
    if (focused) this.focus(); // a button that disappears takes the focus with it
  }

  #key(event) {
    // While an input method composes, Enter chooses a word. 229 is how older Safari says so.
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    this.#submit();
  }

  #submit() {
    const text = this.#input.value.trim();
    if (!text || this.#busy) return; // the draft stays until the answer is there
    this.#input.value = '';
    this.#changed();
    this.#onSend(text);
  }

  #changed() {
    this.#send.disabled = !this.#input.value.trim();
    // Measuring lays the whole text out twice: one that is long for sure takes all the room there is.
    const isLong = this.#input.value.length > LONG;
    this.#input.style.height = isLong ? '100dvh' : 'auto';
    if (!isLong) this.#input.style.height = `${this.#input.scrollHeight}px`;
  }
}
