"use strict";
// The page: draws the open scopes, folds and unfolds them, searches, shows details, zooms and moves. Texts from the
// graph become text nodes and attributes only, never markup.
function showGraph(document, window, view) {
  const SVG = "http://www.w3.org/2000/svg";
  const ROOT = 0, MOST_HITS = 300, CLOSEST = 4, FARTHEST = 0.02;
  const byId = (id) => document.getElementById(id);
  const canvas = byId("canvas"), space = byId("space"), details = byId("details");
  const found = byId("found"), box = byId("search");
  const first = new Set(view.opened);
  let opened = new Set(first), placed = null, hits = [], current = -1, focused = null;
  const at = { x: 0, y: 0, k: 1 };

  function make(name, attributes, ...inside) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
    for (const child of inside) element.appendChild(child);
    return element;
  }

  function words(text, attributes) {
    const element = make("text", attributes);
    element.textContent = text;
    return element;
  }

  function draw() {
    placed = layout.place(view, opened);
    const marked = new Set(hits);
    const backgrounds = [], fronts = [];
    for (const [number, rect] of placed.rects) {
      if (number === ROOT) continue;
      const isOpen = placed.bands.has(number);
      const classes = `${view.classes[number]}${view.rule[number] < 0 ? "" : ` r${view.rule[number]}`}`;
      const more = `${marked.has(number) ? " hit" : ""}${hits[current] === number ? " current" : ""}`;
      if (isOpen) backgrounds.push(make("g", { class: `open ${classes}${more}` }, body(rect, 8, rect.x, rect.y)));
      fronts.push(isOpen ? nameOf(number, rect) : boxOf(number, rect, classes + more));
    }
    const edges = layout.routes(view, placed).map((route) => make("path", {
      class: route.onPath ? "edge path" : "edge",
      d: layout.pathOf(route, placed.rects.get(route.source), placed.rects.get(route.target)),
      "marker-end": `url(#${route.onPath ? "thick" : "plain"})`,
    }));
    space.replaceChildren(...backgrounds, ...edges, ...fronts);
  }

  function body(rect, radius, x, y) {
    return make("rect", { class: "body", x, y, width: rect.w, height: rect.h, rx: radius });
  }

  function control(number, isOpen, attributes, ...inside) {
    const isScope = view.children[number].length > 0;
    const more = isScope ? { role: "button", "aria-expanded": isOpen } : { role: "img" };
    const label = `${view.titles[number]}, ${view.subtitles[number]}`;
    return make("g", { ...attributes, ...more, "data-box": number, tabindex: 0, "aria-label": label }, ...inside);
  }

  function nameOf(number, rect) {
    const head = make("rect", { class: "head", x: rect.x, y: rect.y, width: rect.w, height: 22, rx: 8 });
    const text = words(`▾ ${view.labels[number]}`, { class: "name", x: rect.x + 8, y: rect.y + 16 });
    return control(number, true, { class: "opened" }, head, text);
  }

  function boxOf(number, rect, classes) {
    const isScope = view.children[number].length > 0, rule = view.rule[number];
    const parts = [];
    if (isScope) parts.push(make("rect", { class: "behind", x: 4, y: 4, width: rect.w, height: rect.h, rx: 4 }));
    parts.push(body(rect, 4, 0, 0));
    if (rule >= 0) parts.push(badge(rule, view.legend[rule].mark, 5, 11, 17, 16));
    const left = rule >= 0 ? 26 : 10;
    parts.push(words(view.labels[number], { class: "first", x: left, y: 16 }));
    parts.push(words(view.subtitles[number], { class: "second", x: left, y: 31 }));
    let right = rect.w - 12;
    for (const word of Object.keys(view.pills)) {
      if (!view.classes[number].split(" ").includes(word)) continue;
      parts.push(make("circle", { class: `pill ${word}`, cx: right, cy: 11, r: 7 }));
      parts.push(words(view.pills[word], { class: "pill", x: right, y: 14.5, "text-anchor": "middle" }));
      right -= 16;
    }
    let x = 10;
    for (const [of, text, width] of view.badges[number]) {
      parts.push(badge(of, text, x, 37, width, 15));
      x += width + 4;
    }
    if (view.more[number]) parts.push(words("…", { class: "second", x, y: 49 }));
    return control(number, false, { class: classes, transform: `translate(${rect.x} ${rect.y})` }, ...parts);
  }

  function badge(rule, text, x, y, width, height) {
    const background = make("rect", { class: "mark", x, y, width, height, rx: 4 });
    const middle = { class: "mark", x: x + width / 2, y: y + height - 4, "text-anchor": "middle" };
    return make("g", { class: `r${rule}` }, background, words(text, middle));
  }

  // Zoom and position.

  function move() {
    space.setAttribute("transform", `translate(${at.x} ${at.y}) scale(${at.k})`);
  }

  function zoom(factor, x, y) {
    const k = Math.min(CLOSEST, Math.max(FARTHEST, at.k * factor));
    at.x = x - ((x - at.x) * k) / at.k;
    at.y = y - ((y - at.y) * k) / at.k;
    at.k = k;
    move();
  }

  function fit(whole) {
    const size = canvas.getBoundingClientRect(), graph = placed.rects.get(ROOT);
    const wide = size.width / (graph.w + 40), high = size.height / (graph.h + 40);
    // Show the top of a tall graph, large enough to read.
    at.k = Math.min(1.2, whole ? Math.min(wide, high) : Math.max(Math.min(wide, high), 0.8));
    at.x = (size.width - graph.w * at.k) / 2;
    at.y = whole ? (size.height - graph.h * at.k) / 2 : 20;
    move();
  }

  function center(number) {
    const size = canvas.getBoundingClientRect(), rect = placed.rects.get(number);
    at.k = Math.max(at.k, 0.7);
    at.x = size.width / 2 - (rect.x + rect.w / 2) * at.k;
    at.y = size.height / 2 - (rect.y + rect.h / 2) * at.k;
    move();
  }

  // Actions.

  function toggle(number) {
    if (!view.children[number].length) return;
    const before = placed.rects.get(number);
    opened = layout.toggled(view, opened, number);
    draw();
    // Keep the clicked box under the pointer.
    const after = placed.rects.get(number);
    at.x += (before.x + before.w / 2 - after.x - after.w / 2) * at.k;
    at.y += (before.y - after.y) * at.k;
    move();
    focus(number);
  }

  function focus(number) {
    for (const element of space.children) {
      if (element.getAttribute("data-box") === String(number)) element.focus({ preventScroll: true });
    }
  }

  function fold(scopes, whole) {
    opened = new Set(scopes);
    draw();
    fit(whole);
  }

  function showHits(boxes, total) {
    hits = boxes;
    current = -1;
    found.textContent = total === null ? "" : boxes.length ? `${boxes.length}${boxes.length === MOST_HITS ? "+" : ""}` : "none";
    if (boxes.length) next(1);
    else draw();
  }

  function next(step) {
    if (!hits.length) return;
    current = (current + step + hits.length) % hits.length;
    for (const scope of layout.around(view, hits[current])) opened.add(scope);
    found.textContent = `${current + 1} of ${hits.length}${hits.length === MOST_HITS ? "+" : ""}`;
    draw();
    center(hits[current]);
    showDetails(hits[current]);
  }

  function showRule(rule) {
    const boxes = [];
    view.rule.forEach((each, number) => { if (each === rule && boxes.length < MOST_HITS) boxes.push(number); });
    for (const number of boxes) for (const scope of layout.around(view, number)) opened.add(scope);
    showHits(boxes, boxes.length);
  }

  function showDetails(number) {
    if (number === focused) return;
    focused = number;
    const lines = view.details[number] === undefined
      ? [view.titles[number], view.subtitles[number], ...view.badges[number].map(([of, text]) => `${view.legend[of].name} ${text}`)]
      : [view.titles[number], ...view.details[number].map((line) => view.texts[line])];
    details.replaceChildren(...lines.map((line, index) => {
      const element = document.createElement(index ? "div" : "strong");
      element.textContent = line;
      return element;
    }));
    details.hidden = false;
  }

  // Events.

  function boxAt(target) {
    const element = target.closest("[data-box]");
    return element === null ? null : Number(element.getAttribute("data-box"));
  }

  let dragged = null, wasDragged = false;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    dragged = { x: event.clientX, y: event.clientY };
    wasDragged = false;
  });
  window.addEventListener("pointermove", (event) => {
    if (dragged === null) return;
    const x = event.clientX - dragged.x, y = event.clientY - dragged.y;
    if (!wasDragged && Math.abs(x) + Math.abs(y) < 4) return;
    wasDragged = true;
    at.x += x;
    at.y += y;
    dragged = { x: event.clientX, y: event.clientY };
    move();
  });
  for (const end of ["pointerup", "pointercancel"]) window.addEventListener(end, () => { dragged = null; });
  canvas.addEventListener("click", (event) => {
    const number = boxAt(event.target);
    if (number !== null && !wasDragged) toggle(number);
  });
  for (const name of ["pointerover", "focusin"]) {
    canvas.addEventListener(name, (event) => {
      const number = boxAt(event.target);
      if (number !== null && dragged === null) showDetails(number);
    });
  }
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const size = canvas.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), event.clientX - size.left, event.clientY - size.top);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const size = canvas.getBoundingClientRect(), number = boxAt(event.target);
    const keys = {
      "+": () => zoom(1.25, size.width / 2, size.height / 2),
      "-": () => zoom(0.8, size.width / 2, size.height / 2),
      0: () => fit(true),
      ArrowLeft: () => { at.x += 60; move(); },
      ArrowRight: () => { at.x -= 60; move(); },
      ArrowUp: () => { at.y += 60; move(); },
      ArrowDown: () => { at.y -= 60; move(); },
      Enter: () => { if (number !== null) toggle(number); },
      " ": () => { if (number !== null) toggle(number); },
    };
    if (keys[event.key] === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target === box) return;
    event.preventDefault();
    box.focus();
  });
  let waiting = null;
  box.addEventListener("input", () => {
    window.clearTimeout(waiting);
    waiting = window.setTimeout(() => showHits(layout.search(view, box.value, MOST_HITS), box.value || null), 150);
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter") next(event.shiftKey ? -1 : 1);
  });
  byId("back").addEventListener("click", () => next(-1));
  byId("next").addEventListener("click", () => next(1));
  byId("fold").addEventListener("click", () => fold([], false));
  byId("first").addEventListener("click", () => fold(first, false));
  byId("fit").addEventListener("click", () => fit(true));
  for (const element of document.querySelectorAll("[data-rule]")) {
    element.addEventListener("click", () => showRule(Number(element.getAttribute("data-rule"))));
  }

  draw();
  fit(false);
}
