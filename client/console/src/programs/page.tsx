import type { Route } from "../router";

/** The page of programs. */
export function ProgramsPage(_props: { route: Route }) {
  return <h1>Programs</h1>;
}
