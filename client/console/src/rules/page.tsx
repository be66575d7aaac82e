import type { Route } from "../router";

/** The page of rules. */
export function RulesPage(_props: { route: Route }) {
  return <h1>Rules</h1>;
}
