import {
  centred,
  fitted,
  neighbour,
  opening,
  revealed,
  zoomed,
  type Camera,
  type Direction,
  type Size,
} from "./camera";
import { arrows, drawGraph, FONT, makeMeasure, svg } from "./canvas";
import { hasClass, ROOT, search, Tree, type GraphData } from "./graph_data";
import { initiallyOpen, layoutGraph, MAX_BOXES, type Layout, type Placed } from "./graph_layout";
import { detailsPanel, legendPanel } from "./panels";
import "./graph.css";

const MAX_HITS = 300;
// Graphs up to this size are drawn with their constants.
const MAX_SMALL_GRAPH = 60;

export interface GraphViewOptions {
  /** Whether the wheel zooms by itself, as on a page that shows nothing else, or only with Ctrl. */
  wheelZooms?: boolean;
}

/** Draws a graph in an element, with search, legend and the details of the selected node. */
export class GraphView {
  private tree: Tree;
  private opened: Set<number>;
  private layout!: Layout;
  private camera: Camera = { x: 0, y: 0, k: 1 };
  private hits: number[] = [];
  private current = -1;
  private selected: number | null = null;
  private focused: number | null = null;
  private readonly measure = makeMeasure();
  private readonly space = svg("g", { class: "gv-space" }) as SVGGElement;
  private readonly canvas = svg("svg", { class: "gv-canvas", role: "group", tabindex: 0 }) as SVGSVGElement;
  private readonly legend = element("aside", "gv-legend");
  private readonly details = element("aside", "gv-details");
  private readonly found = element("span", "gv-found");
  private readonly search = element("input", "gv-search") as HTMLInputElement;
  private readonly constants = element("input", "") as HTMLInputElement;
  private readonly constantsLabel = element("label", "gv-check");
  private touched = false;

  constructor(
    private readonly root: HTMLElement,
    private graph: GraphData,
    private readonly options: GraphViewOptions = {},
  ) {
    const small = Object.keys(graph.details).length <= MAX_SMALL_GRAPH;
    this.tree = new Tree(graph, small);
    this.opened = new Set();
    this.constants.checked = small;
    this.build();
    this.listen();
    this.showPanels();
    this.restart();
    new ResizeObserver(() => this.touched || this.restart()).observe(this.canvas);
  }

  /** Shows the same graph with other rules; what is open, where it is and what is selected stays if the boxes are the same. */
  update(graph: GraphData): void {
    const same =
      graph.titles.length === this.graph.titles.length &&
      graph.titles.every((title, box) => title === this.graph.titles[box]);
    this.graph = graph;
    this.tree = new Tree(graph, this.constants.checked);
    this.showPanels();
    if (!same) {
      this.selected = this.focused = null;
      this.touched = false;
      this.restart();
    } else {
      this.draw();
    }
    this.showDetails();
  }

  /** Opens the scopes around a node, selects it and moves it to the middle. Returns whether the node is in the drawing. */
  reveal(title: string): boolean {
    const box = this.graph.titles.findIndex((each, index) => each === title && !this.graph.children[index]!.length);
    if (box >= 0) this.goTo(box);
    return box >= 0;
  }

  private build(): void {
    this.root.classList.add("gv");
    this.search.type = "search";
    this.search.placeholder = "Find a node, op or rule";
    this.search.setAttribute("aria-label", "Find a node, op or rule");
    this.search.title = "Press / to search, Enter for the next hit";
    this.found.setAttribute("aria-live", "polite");
    this.constants.type = "checkbox";
    this.constantsLabel.append(this.constants, "constants");
    this.constantsLabel.title = "Draw nodes that only constants and variables determine";
    const bar = element("div", "gv-bar");
    bar.setAttribute("role", "toolbar");
    bar.setAttribute("aria-label", "Graph");
    bar.append(
      this.search,
      button("↑", "Previous hit", () => this.next(-1)),
      button("↓", "Next hit", () => this.next(1)),
      this.found,
      element("span", "gv-gap"),
      this.constantsLabel,
      button("Fold", "Fold all scopes", () => this.fold()),
      button("Fit", "Fit the whole graph (0)", () => this.fit()),
      button("−", "Zoom out (-)", () => this.zoom(0.8)),
      button("+", "Zoom in (+)", () => this.zoom(1.25)),
    );
    this.canvas.setAttribute("aria-label", "Graph. Arrow keys move between boxes, Enter opens.");
    this.canvas.style.fontFamily = FONT;
    this.canvas.append(svg("defs", {}, ...arrows()), this.space);
    this.legend.setAttribute("aria-label", "Legend");
    this.details.setAttribute("aria-label", "Details");
    this.details.setAttribute("aria-live", "polite");
    const main = element("div", "gv-main");
    main.append(this.legend, this.canvas, this.details);
    this.root.append(bar, main);
    this.details.hidden = true;
  }

  private showPanels(): void {
    const wide = this.root.clientWidth > 760;
    this.legend.replaceChildren(legendPanel(this.graph, wide, (rule) => this.showRule(rule)));
    const some = this.graph.classes.some((classes) => classes.startsWith("leaf") && classes.includes(" constant"));
    this.constantsLabel.hidden = !some;
  }

  private size(): Size {
    const { width, height } = this.canvas.getBoundingClientRect();
    return { width: Math.max(width, 50), height: Math.max(height, 50) };
  }

  private restart(): void {
    const { width, height } = this.size();
    this.opened = initiallyOpen(this.tree, this.measure, width, height);
    this.draw();
    this.look(this.opening());
  }

  private draw(): void {
    if (this.tree.visible(this.opened).length > MAX_BOXES) this.foldOthers();
    this.layout = layoutGraph(this.tree, this.opened, this.measure);
    const current = this.hits[this.current] ?? null;
    const marks = { hits: new Set(this.hits), current, selected: this.selected };
    this.space.replaceChildren(...drawGraph(this.graph, this.layout, marks, this.measure));
    const first = this.boxElement(this.focused ?? -1) ?? this.space.querySelector("[data-box]");
    first?.setAttribute("tabindex", "0");
  }

  /** Keeps only the scopes open that the last opened box needs. */
  private foldOthers(): void {
    const last = [...this.opened].pop();
    this.opened = new Set(last === undefined ? [] : [...this.tree.around(last), last]);
  }

  /** Returns the camera that shows the start of the path. */
  private opening(): Camera {
    const start =
      this.layout.boxes.find(({ box, open }) => !open && hasClass(this.graph, box, "x")) ?? this.layout.boxes[0];
    return opening(this.layout, this.size(), start ? start.x + start.w / 2 : 0);
  }

  private look(camera: Camera): void {
    this.camera = camera;
    this.space.setAttribute("transform", `translate(${camera.x} ${camera.y}) scale(${camera.k})`);
  }

  private fit(): void {
    this.touched = true;
    this.look(fitted(this.layout, this.size()));
  }

  private zoom(factor: number, x = this.size().width / 2, y = this.size().height / 2): void {
    this.touched = true;
    this.look(zoomed(this.camera, factor, x, y));
  }

  private fold(): void {
    this.touched = true;
    this.opened = new Set();
    this.draw();
    this.look(this.opening());
  }

  private placed(box: number): Placed | undefined {
    return this.layout.boxes.find((at) => at.box === box);
  }

  private boxElement(box: number): SVGElement | null {
    return this.space.querySelector(`[data-box="${box}"]`);
  }

  /** Unfolds or folds a scope, which stays under the pointer; selects a node. */
  private activate(box: number): void {
    this.touched = true;
    const before = this.placed(box);
    if (this.tree.children[box]!.length && before) {
      this.opened = this.tree.toggled(this.opened, box);
      this.selected = box;
      this.draw();
      const after = this.placed(box)!;
      const { x, y, k } = this.camera;
      this.look({ x: x + (before.x + before.w / 2 - after.x - after.w / 2) * k, y: y + (before.y - after.y) * k, k });
    } else {
      this.selected = box;
      this.draw();
    }
    this.showDetails();
    // The details may cover the box.
    const at = this.placed(box);
    if (at) this.look(revealed(this.camera, { ...at, h: Math.min(at.h, 44) }, this.size()));
    this.focus(box);
  }

  private goTo(box: number): void {
    this.touched = true;
    if (!this.tree.constants && !this.tree.has(box) && !this.graph.children[box]!.length) this.setConstants(true);
    for (const scope of this.tree.around(box).reverse()) {
      this.opened.delete(scope);
      this.opened.add(scope);
    }
    this.selected = box;
    this.draw();
    const at = this.placed(box);
    if (at) this.look(centred(this.camera, at, this.size()));
    this.showDetails();
  }

  private setConstants(shown: boolean): void {
    this.constants.checked = shown;
    this.tree = new Tree(this.graph, shown);
  }

  private focus(box: number): void {
    this.boxElement(this.focused ?? -1)?.setAttribute("tabindex", "-1");
    this.focused = box;
    const found = this.boxElement(box);
    found?.setAttribute("tabindex", "0");
    found?.focus({ preventScroll: true });
  }

  private showHits(boxes: number[], wanted: boolean): void {
    this.hits = boxes;
    this.current = -1;
    this.found.textContent = wanted && !boxes.length ? "none" : "";
    if (boxes.length) this.next(1);
    else this.draw();
  }

  private next(step: number): void {
    if (!this.hits.length) return;
    this.current = (this.current + step + this.hits.length) % this.hits.length;
    const more = this.hits.length === MAX_HITS ? "+" : "";
    this.found.textContent = `${this.current + 1} of ${this.hits.length}${more}`;
    this.goTo(this.hits[this.current]!);
  }

  private showRule(rule: number): void {
    const boxes: number[] = [];
    this.graph.rule.forEach((each, box) => each === rule && boxes.length < MAX_HITS && boxes.push(box));
    this.search.value = "";
    this.showHits(boxes, true);
  }

  private showDetails(): void {
    const box = this.selected;
    this.details.hidden = box === null || box === ROOT;
    if (box === null) return;
    const close = () => {
      this.selected = null;
      this.draw();
      this.showDetails();
      this.canvas.focus();
    };
    this.details.replaceChildren(...detailsPanel(this.graph, box, close));
    this.details.scrollTop = 0;
  }

  private listen(): void {
    this.listenPointers();
    this.canvas.addEventListener(
      "wheel",
      (event) => {
        if (!this.options.wheelZooms && !event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        const { left, top } = this.canvas.getBoundingClientRect();
        this.zoom(
          Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)),
          event.clientX - left,
          event.clientY - top,
        );
      },
      { passive: false },
    );
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("focusin", (event) => {
      const box = boxAt(event.target);
      if (box === null) return;
      this.focused = box;
      const at = this.placed(box);
      // Only keys bring boxes into view: after a click, the box is where the pointer is.
      if (at && (event.target as Element).matches(":focus-visible")) {
        this.look(revealed(this.camera, { ...at, h: Math.min(at.h, 44) }, this.size()));
      }
    });
    document.addEventListener("keydown", (event) => {
      const target = event.target as Element;
      if (event.key !== "/" || target.closest("input, textarea, select, [contenteditable]")) return;
      event.preventDefault();
      this.search.focus();
    });
    let waiting = 0;
    this.search.addEventListener("input", () => {
      window.clearTimeout(waiting);
      waiting = window.setTimeout(() => {
        this.showHits(search(this.graph, this.search.value, MAX_HITS), this.search.value.trim() !== "");
      }, 150);
    });
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.next(event.shiftKey ? -1 : 1);
    });
    this.constants.addEventListener("change", () => {
      this.setConstants(this.constants.checked);
      this.touched = true;
      this.draw();
    });
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const box = boxAt(event.target);
    const at = box === null ? undefined : this.placed(box);
    const actions: Record<string, () => void> = {
      "+": () => this.zoom(1.25),
      "-": () => this.zoom(0.8),
      0: () => this.fit(),
      Enter: () => box !== null && this.activate(box),
      " ": () => box !== null && this.activate(box),
      Escape: () => {
        this.selected = null;
        this.draw();
        this.showDetails();
        if (box !== null) this.focus(box);
      },
    };
    const arrow = event.key.startsWith("Arrow");
    if (!arrow && !actions[event.key]) return;
    event.preventDefault();
    if (!arrow) return actions[event.key]!();
    const next = at ? neighbour(this.layout.boxes, at, event.key as Direction) : this.layout.boxes[0];
    if (next) this.focus(next.box);
  }

  private listenPointers(): void {
    const down = new Map<number, { x: number; y: number }>();
    let dragged = false;
    const end = (event: PointerEvent) => down.delete(event.pointerId);
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      if (!down.size) dragged = false;
      down.set(event.pointerId, { x: event.clientX, y: event.clientY });
    });
    window.addEventListener("pointermove", (event) => {
      const before = down.get(event.pointerId);
      if (!before) return;
      const now = { x: event.clientX, y: event.clientY };
      if (!dragged && Math.abs(now.x - before.x) + Math.abs(now.y - before.y) < 4) return;
      dragged = this.touched = true;
      const [other] = [...down].filter(([id]) => id !== event.pointerId);
      if (other) {
        const { left, top } = this.canvas.getBoundingClientRect();
        const apart = (point: { x: number; y: number }) => Math.hypot(point.x - other[1].x, point.y - other[1].y) || 1;
        const middle = { x: (now.x + other[1].x) / 2 - left, y: (now.y + other[1].y) / 2 - top };
        this.look(zoomed(this.camera, apart(now) / apart(before), middle.x, middle.y));
      } else {
        this.look({ ...this.camera, x: this.camera.x + now.x - before.x, y: this.camera.y + now.y - before.y });
      }
      down.set(event.pointerId, now);
    });
    window.addEventListener("pointerup", end);
    window.addEventListener("pointercancel", end);
    this.canvas.addEventListener("click", (event) => {
      const box = boxAt(event.target);
      if (box !== null && !dragged) this.activate(box);
    });
  }
}

function boxAt(target: EventTarget | null): number | null {
  const found = target instanceof Element ? target.closest("[data-box]") : null;
  return found ? Number(found.getAttribute("data-box")) : null;
}

function element(name: string, className: string): HTMLElement {
  const made = document.createElement(name);
  if (className) made.className = className;
  return made;
}

function button(text: string, label: string, act: () => void): HTMLButtonElement {
  const made = element("button", "gv-button") as HTMLButtonElement;
  made.type = "button";
  made.textContent = text;
  made.title = label;
  made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}
