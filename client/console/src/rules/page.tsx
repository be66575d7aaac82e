import type { Route } from "../router";
import { Gallery } from "./gallery";
import { Playground } from "./playground";
import { RulePage } from "./rule-page";

/** The pages of rules: all rules, one rule, and the playground. */
export function RulesPage({ route }: { route: Route }) {
  if (route.path[0] === "playground") return <Playground route={route} />;
  const name = route.path.slice(1).join("/");
  return name ? <RulePage key={name} name={name} /> : <Gallery route={route} />;
}
