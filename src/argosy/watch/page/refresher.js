// Asking again: never two questions at a time, never more often than a person can look.

/**
 * Return {now(), soon(), stop()} around `ask(signal)`. `now`: what the reader changed; it gives up the question before.
 * `soon`: the run has grown; within `pause_ms`, and after the question that is under way.
 */
export function refresher(ask, onError, pause_ms = 1500) {
  let controller = null;
  let timer = null;
  let again = false;
  let ended = 0;

  async function run() {
    clearTimeout(timer);
    timer = null;
    again = false;
    controller?.abort();
    const mine = new AbortController();
    controller = mine;
    try {
      await ask(mine.signal);
      if (!mine.signal.aborted) onError(null);
    } catch (error) {
      if (!mine.signal.aborted) onError(error);
    } finally {
      if (controller === mine) {
        controller = null;
        ended = performance.now();
        if (again) soon();
      }
    }
  }

  function soon() {
    if (controller) again = true;
    else timer ??= setTimeout(run, Math.max(0, pause_ms - (performance.now() - ended)));
  }

  function stop() {
    clearTimeout(timer);
    timer = null;
    again = false;
    controller?.abort();
  }

  return { now: run, soon, stop };
}
