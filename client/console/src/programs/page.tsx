import type { Route } from "../router";
import { ProgramList } from "./list";
import { ProgramPage } from "./program-page";

/** The pages of stored programs: all programs, and one. */
export function ProgramsPage({ route }: { route: Route }) {
  const id = route.path[1];
  return id === undefined ? <ProgramList route={route} /> : <ProgramPage key={id} id={id} />;
}
