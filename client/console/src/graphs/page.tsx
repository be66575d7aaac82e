import type { Route } from "../router";

/** The page of graphs. */
export function GraphsPage(_props: { route: Route }) {
  return <h1>Graphs</h1>;
}
