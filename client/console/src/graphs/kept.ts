import { type Dispatch, type StateUpdater, useState } from "preact/hooks";
import type { LoadedGraph } from "./api";
import type { Example } from "./examples";

/** A graph that was loaded, by whom: a bearer token, or nobody. */
export interface Chosen {
  graph: LoadedGraph;
  example?: Example | undefined;
  token: string;
}

let chosen: Chosen | undefined;

/** Returns the graph that the page shows, and a function that changes it. It stays while other pages are open. */
export function useChosen(): [Chosen | undefined, (next: Chosen | undefined) => void] {
  const [value, setValue] = useState(chosen);
  const choose = (next: Chosen | undefined) => {
    chosen = next;
    setValue(next);
  };
  return [value, choose];
}

const states = new WeakMap<LoadedGraph, Map<string, unknown>>();

/** Like `useState`, but what was set for this graph is there again after another page was open. */
export function useKept<T>(graph: LoadedGraph, name: string, initial: () => T): [T, Dispatch<StateUpdater<T>>] {
  const known = states.get(graph) ?? new Map<string, unknown>();
  states.set(graph, known);
  const [value, setValue] = useState<T>(() => (known.has(name) ? (known.get(name) as T) : initial()));
  known.set(name, value);
  return [value, setValue];
}
