import type { Route } from "../router";

/** The page of server. */
export function ServerPage(_props: { route: Route }) {
  return <h1>Server</h1>;
}
