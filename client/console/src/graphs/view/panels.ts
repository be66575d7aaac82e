import { mark, pillOf, svg } from "./canvas";
import { type GraphData, hasClass } from "./graph_data";

function make(name: string, className: string, ...inside: (Node | string)[]): HTMLElement {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...inside);
  return element;
}

function sample(...inside: SVGElement[]): SVGElement {
  return svg(
    "svg",
    { class: "gv-sample", width: 26, height: 18, viewBox: "0 0 26 18", "aria-hidden": "true" },
    ...inside,
  );
}

/** Returns the legend: the graph's ys and xs, errors, rules and what lines mean. A rule is a button. */
export function legendPanel(graph: GraphData, open: boolean, showRule: (rule: number) => void): HTMLElement {
  const rows: HTMLElement[] = [];
  for (const [pill, line] of graph.heading) {
    const drawn = pill ? [sample(pillOf(pill, graph.pills[pill]!, 12, 9))] : [];
    rows.push(make("p", pill === "wrong" ? "gv-wrong" : "", ...drawn, make("span", "", line)));
  }
  if (graph.legend.length) rows.push(make("h2", "", "Rules"));
  graph.legend.forEach(({ mark: letter, name, counts }, rule) => {
    const text = make("span", "", make("b", "", name), make("small", "", counts));
    const button = make("button", "gv-rule", sample(mark(graph, rule, letter, 4, 0, 17, 18)), text);
    button.setAttribute("type", "button");
    button.title = `Show the nodes with ${name}`;
    button.dataset["rule"] = String(rule);
    button.addEventListener("click", () => showRule(rule));
    rows.push(button);
  });
  rows.push(make("h2", "", "Lines"));
  for (const [classes, line] of graph.samples.filter(([classes]) => occurs(graph, classes))) {
    const drawn = classes.startsWith("edge")
      ? svg("path", { class: classes, d: "M2,9 H24" })
      : svg("g", { class: classes }, svg("rect", { class: "body", x: 2, y: 3, width: 22, height: 12, rx: 3 }));
    rows.push(make("p", "", sample(drawn), make("span", "", line)));
  }
  const details = make("details", "", make("summary", "", "Legend"), ...rows) as HTMLDetailsElement;
  details.open = open;
  return details;
}

/** Tells whether something in the graph looks like a sample of the legend. */
function occurs(graph: GraphData, sample: string): boolean {
  const [kind, word] = sample.split(" ");
  if (kind === "edge") return graph.edges.some(([, , onPath]) => onPath);
  const isLike = (box: number) => (word ? hasClass(graph, box, word) : !hasClass(graph, box, "path"));
  return graph.classes.some((_, box) => hasClass(graph, box, "leaf") && isLike(box));
}

/** Returns the details of a box: a node's facts, or the rules inside a scope. */
export function detailsPanel(graph: GraphData, box: number, close: () => void): HTMLElement[] {
  const button = make("button", "gv-button gv-close", "×");
  button.setAttribute("type", "button");
  button.setAttribute("aria-label", "Close details");
  button.addEventListener("click", close);
  const head = make("div", "gv-details-head", make("h2", "", graph.titles[box]!), button);
  const facts = graph.details[box]?.map((line) => splitFact(graph.texts[line]!)) ?? [
    ["scope", graph.subtitles[box]!],
    ...graph.badges[box]!.map(([rule, text]) => [graph.legend[rule]!.name, text]),
  ];
  const list = make("dl", "");
  for (const [name, value] of facts as [string, string][]) {
    const term = make("dt", name === "wrong" ? "gv-wrong" : "", name);
    const letter =
      name === "rule" && graph.rule[box]! >= 0
        ? [sample(mark(graph, graph.rule[box]!, graph.legend[graph.rule[box]!]!.mark, 4, 0, 17, 18))]
        : [];
    list.append(term, make("dd", name === "wrong" ? "gv-wrong" : "", ...letter, value));
  }
  return [head, list];
}

function splitFact(line: string): [string, string] {
  const at = line.indexOf(": ");
  return at < 0 ? ["", line] : [line.slice(0, at), line.slice(at + 2)];
}
