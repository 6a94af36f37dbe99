/** Keeps the end of the conversation in view, but only while the reader is there. */

/** How near to the end counts as there, in px: scroll positions are rounded. */
const NEAR = 8;

export class Follower {
  #box;
  #button;
  #following = true;
  #top = 0;
  #height = 0;

  /**
   * @param {HTMLElement} box  scrolls
   * @param {HTMLElement} button  takes the reader to the end
   */
  constructor(box, button) {
    this.#box = box;
    this.#button = button;
    box.addEventListener('scroll', () => this.#scrolled(), { passive: true });
    button.addEventListener('click', () => this.jump());
    // A phone's keyboard or a growing composer takes room from below.
    new ResizeObserver(() => this.settle()).observe(box);
  }

  /** Call after the content grew. */
  settle() {
    if (this.#following) this.#box.scrollTop = this.#box.scrollHeight;
    this.#showButton();
  }

  jump() {
    this.#following = true;
    this.settle();
  }

  /** Nothing to follow: show the beginning. */
  rest() {
    this.#following = false;
    this.#box.scrollTop = 0;
  }

  #scrolled() {
    const { scrollTop, scrollHeight } = this.#box;
    // Upwards on an unchanged text can only be the reader: stop following at once, or the text tears them back.
    if (scrollTop < this.#top && scrollHeight >= this.#height) this.#following = false;
    if (this.#distance() <= NEAR) this.#following = true;
    this.#top = scrollTop;
    this.#height = scrollHeight;
    this.#showButton();
  }

  #distance() {
    const { scrollTop, scrollHeight, clientHeight } = this.#box;
    return scrollHeight - clientHeight - scrollTop;
  }

  #showButton() {
    this.#button.hidden = this.#following || this.#distance() <= NEAR;
  }
}
