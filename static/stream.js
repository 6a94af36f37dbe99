/**
 * An answer's Markdown in the page while it grows.
 *
 * Only the last block is parsed and rendered again: blocks that can not change any more are put into the page once and
 * left alone. Of the last block, nodes that did not change stay as they are, so a selection in it survives and the
 * browser lays out little.
 */

import { blocksOf, nodesOf } from './markdown.js';

/** A line that may yet become an item of the list before it. */
const MAYBE_ITEM = /^ {0,3}(?:[-+*]|\d{1,9}[.)]?)\s*$/;

export class StreamingMarkdown {
  #root;
  /** The text whose blocks are in the page for good, and how many nodes they made. */
  #finished = '';
  #finishedNodes = 0;
  /** @type {import('./markdown.js').Links} */
  #links = {};

  /** @param {HTMLElement} root  holds the answer and nothing else */
  constructor(root) {
    this.#root = root;
  }

  /**
   * Show `text`: what was shown before plus more, or, after a cut, something else.
   *
   * @param {string} text
   * @param {boolean} whole  no more will follow
   */
  show(text, whole = false) {
    const source = text.includes('\r') ? text.replace(/\r\n?/g, '\n') : text;
    if (!source.startsWith(this.#finished)) this.#reset();
    const blocks = blocksOf(source.slice(this.#finished.length), this.#links);
    if (whole && this.#finished && hasDefinition(blocks, this.#links)) {
      // A link's address may be given below its use: only the whole text shows all links.
      this.#reset();
      this.show(source, true);
      return;
    }
    const done = whole ? 0 : countFinished(blocks);
    const fragment = nodesOf(blocks.slice(0, done));
    const nodes = fragment.childNodes.length;
    fragment.append(nodesOf(blocks.slice(done)));
    patch(this.#root, this.#finishedNodes, fragment);
    this.#finish(blocks.slice(0, done), nodes);
  }

  #finish(blocks, nodes) {
    this.#finishedNodes += nodes;
    for (const block of blocks) {
      this.#finished += block.raw;
      if (block.type === 'def') this.#links[block.tag] ??= { href: block.href, title: block.title };
    }
  }

  #reset() {
    this.#finished = '';
    this.#finishedNodes = 0;
    this.#links = {};
  }
}

const hasDefinition = (/** @type {any[]} */ blocks, /** @type {object} */ links) =>
  Object.keys(links).length > 0 || blocks.some((block) => block.type === 'def');

/**
 * How many of `blocks`, from the first, no later text can change.
 *
 * All before the last one, if the last one's kind is known: after a blank line unless it may be a list's next item,
 * else as soon as its first line is whole (`#` may become a heading or a `#word` of the paragraph before).
 */
export function countFinished(blocks) {
  let last = blocks.length - 1;
  while (last >= 0 && blocks[last].type === 'space') last -= 1;
  if (last <= 0) return 0;
  const rest = blocks.slice(last).map((/** @type {any} */ block) => block.raw).join('');
  const afterBlank = blocks[last - 1].raw.endsWith('\n\n') || blocks[last - 1].type === 'space';
  const known = rest.includes('\n') || (afterBlank && !MAYBE_ITEM.test(rest));
  return known ? last : 0;
}

/**
 * Make the children of `parent` from `start` on equal to those of `wanted`, touching only what differs.
 *
 * @param {Node} parent
 * @param {number} start
 * @param {Node} wanted  is emptied
 */
function patch(parent, start, wanted) {
  let old = parent.childNodes[start] ?? null;
  for (const node of [...wanted.childNodes]) {
    if (!old) {
      parent.appendChild(node);
      continue;
    }
    const next = old.nextSibling;
    if (!old.isEqualNode(node)) update(parent, old, node);
    old = next;
  }
  while (old) {
    const next = old.nextSibling;
    parent.removeChild(old);
    old = next;
  }
}

function update(parent, old, node) {
  if (old.nodeType === Node.TEXT_NODE && node.nodeType === Node.TEXT_NODE) {
    // Appending keeps a selection and is cheap for the browser; setting the whole is neither.
    if (node.data.startsWith(old.data)) old.appendData(node.data.slice(old.data.length));
    else old.data = node.data;
  } else if (old.nodeType === Node.ELEMENT_NODE && sameShell(old, node)) {
    patch(old, 0, node);
  } else {
    parent.replaceChild(node, old);
  }
}

function sameShell(old, node) {
  return (
    old.nodeName === node.nodeName &&
    old.attributes.length === node.attributes.length &&
    [...old.attributes].every((attribute) => node.getAttribute(attribute.name) === attribute.value)
  );
}
