"use strict";
// As much of a document as the page's script asks for, so that it runs under Node. It reads a page's text from standard
// input and steps from the command line, and writes what the page shows after each step as JSON.
//
// Steps: ["click", selector], ["search", text], ["key", selector, key], ["wheel"]; a selector is `#id`, `box:TITLE`
// or `rule:NUMBER`.
const fs = require("fs");
const vm = require("vm");

class Element {
  constructor(name) {
    Object.assign(this, { name, attributes: {}, children: [], listeners: {}, textContent: "", hidden: false, value: "" });
  }
  setAttribute(key, value) { this.attributes[key] = value; }
  getAttribute(key) { return this.attributes[key] === undefined ? null : this.attributes[key]; }
  appendChild(child) { child.parent = this; this.children.push(child); return child; }
  replaceChildren(...children) { this.children = []; children.forEach((child) => this.appendChild(child)); }
  addEventListener(name, listener) { (this.listeners[name] ||= []).push(listener); }
  getBoundingClientRect() { return { left: 0, top: 0, width: 1000, height: 700 }; }
  focus() { page.focused = this; }
  closest() {
    for (let element = this; element; element = element.parent) if (element.getAttribute("data-box") !== null) return element;
    return null;
  }
  dispatch(name, more) {
    const event = { target: this, button: 0, clientX: 500, clientY: 300, deltaY: 0, preventDefault() {}, ...more };
    for (let element = this; element; element = element.parent) for (const listener of element.listeners[name] || []) listener(event);
  }
  *all() { yield this; for (const child of this.children) yield* child.all(); }
}

const text = fs.readFileSync(0, "utf8");
const scripts = [...text.matchAll(/<script([^>]*)>([\s\S]*?)<\/script>/g)];
const page = { elements: {}, focused: null, timers: [], rules: [] };
for (const [, id] of text.matchAll(/ id="([^"]+)"/g)) page.elements[id] = new Element(id);
for (const [, number] of text.matchAll(/<button data-rule="(\d+)"/g)) {
  const button = new Element("button");
  button.setAttribute("data-rule", number);
  page.rules.push(button);
}
page.elements.canvas.appendChild(page.elements.space);
page.elements.graph.textContent = scripts[0][2];
const document = new Element("document");
Object.assign(document, {
  getElementById: (id) => page.elements[id],
  createElement: (name) => new Element(name),
  createElementNS: (_, name) => new Element(name),
  querySelectorAll: () => page.rules,
});
const window = new Element("window");
Object.assign(window, { setTimeout: (call) => page.timers.push(call), clearTimeout() { page.timers = []; } });
const context = vm.createContext({ document, window });
vm.runInContext(scripts[1][2], context);
const view = JSON.parse(scripts[0][2]);

function chosen(selector) {
  if (selector.startsWith("#")) return page.elements[selector.slice(1)];
  if (selector.startsWith("rule:")) return page.rules[Number(selector.slice(5))];
  for (const element of page.elements.space.all()) {
    const box = element.getAttribute("data-box");
    if (box !== null && view.titles[box] === selector.slice(4)) return element.children[0];
  }
  throw new Error(`nothing is ${selector}`);
}

function shown() {
  const boxes = [], edges = [];
  for (const element of page.elements.space.children) {
    const box = element.getAttribute("data-box");
    if (box !== null) boxes.push({ box, class: element.attributes.class, place: element.attributes.transform || "open" });
    if (element.name === "path") edges.push([element.attributes.class, element.attributes.d]);
  }
  const texts = [...page.elements.space.all()].filter((each) => each.name === "text").map((each) => each.textContent);
  const told = page.elements.details.children.map((each) => each.textContent);
  const names = [...new Set([...page.elements.space.all()].map((each) => each.name))];
  return { boxes, edges, texts, told, names, found: page.elements.found.textContent,
    focused: page.focused && page.focused.getAttribute("data-box"), moved: page.elements.space.attributes.transform };
}

const seen = [shown()];
for (const [step, selector, key] of JSON.parse(process.argv[2])) {
  if (step === "search") {
    page.elements.search.value = selector;
    page.elements.search.dispatch("input");
    page.timers.splice(0).forEach((call) => call());
  } else if (step === "key") chosen(selector).dispatch("keydown", { key });
  else if (step === "wheel") page.elements.canvas.dispatch("wheel", { deltaY: -200 });
  else chosen(selector).dispatch(step);
  seen.push(shown());
}
process.stdout.write(JSON.stringify(seen));
