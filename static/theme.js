// Runs before the first paint, as a plain script: a page that turns dark only after it was shown light hurts the eyes.
(() => {
  let stored = null;
  try {
    stored = localStorage.getItem('chat.theme');
  } catch {
    // storage is off: the system's choice holds
  }
  if (stored === 'light' || stored === 'dark') document.documentElement.dataset.theme = stored;
})();
