// Search for pages that are opened as files. Browsers start no worker there, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = Object.assign(document.createElement("iframe"), { hidden: true });
      const load = (source) =>
        new Promise((done) => {
          const script = frame.contentDocument.createElement("script");
          frame.contentDocument.body.append(Object.assign(script, { src: source, onload: done }));
        });
      const begin = new Promise((done) => frame.addEventListener("load", done, { once: true }));
      this.ready = begin.then(() => {
        this.inside = frame.contentWindow;
        this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        this.inside.importScripts = (...sources) =>
          sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
        return load(address);
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }
  };
}
