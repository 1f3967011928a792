// The server's answers. Addresses are relative, so that the page works behind a proxy with a path of its own.

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const idPath = (id) => id.split("/").map(encodeURIComponent).join("/");

/** GET api/PATH as JSON. Raises ApiError with a sentence for people; an aborted request raises AbortError as ever. */
export async function get(path, params = {}, signal = undefined) {
  const query = new URLSearchParams(
    Object.entries(params).filter(([, value]) => value !== undefined && value !== null),
  );
  let response;
  try {
    response = await fetch(`api/${path}${query.size ? `?${query}` : ""}`, { signal, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is argosy watch still running?", 0);
  }
  if (response.status === 401 || response.status === 403) {
    throw new ApiError("This page needs its token: open the address that argosy watch printed.", response.status);
  }
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new ApiError(
      body.error ?? body.detail ?? `The server answered ${response.status} to ${path}.`,
      response.status,
    );
  }
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(`The server's answer to ${path} was cut off.`, response.status);
  }
}

/** What a run says: `part` is one of series, evaluations, time, memory, ...; without it the run itself. */
export const ofRun = (id, part, params, signal) => get(`runs/${idPath(id)}${part ? `/${part}` : ""}`, params, signal);

/** Where a file of a profile is downloaded. */
export const profileFile = (id, profile, file) => `api/runs/${[id, "profiles", profile, file].map(idPath).join("/")}`;

const RETRY_S = [1, 2, 5, 10, 30];
const SILENT_MS = 35000; // the server says something every ten seconds

/**
 * Follow the server. `onChange({id, step, state})` when a run has grown; `onState("live" | "waiting" | "lost")`.
 * It tries again for ever: a server that was started anew is found by itself.
 */
export function follow(onChange, onState) {
  let failures = 0;
  let source;
  let silence;
  const lost = () => {
    // EventSource gives up for good after some answers; opening it anew does not.
    source.close();
    clearTimeout(silence);
    const wait = RETRY_S[Math.min(failures, RETRY_S.length - 1)];
    failures += 1;
    onState(failures > 2 ? "lost" : "waiting");
    setTimeout(open, 1000 * wait);
  };
  const heard = () => {
    // A connection can die without a word, when a laptop sleeps.
    clearTimeout(silence);
    silence = setTimeout(lost, SILENT_MS);
  };
  const open = () => {
    source = new EventSource("api/live");
    heard();
    source.onopen = () => {
      failures = 0;
      heard();
      onState("live");
    };
    const take = (event) => {
      heard();
      try {
        onChange(JSON.parse(event.data));
      } catch {
        // A beat has no data, and what cannot be read changes nothing.
      }
    };
    source.onmessage = take;
    source.addEventListener("run", take);
    source.addEventListener("beat", heard);
    source.onerror = lost;
  };
  open();
  addEventListener("pagehide", () => source.close());
}
