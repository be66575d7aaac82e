import type { GraphData } from "./graph_data";
import { GraphView } from "./graph_view";
import "./explain_page.css";

// The page of `gradrule explain --html`: one graph, in the whole window.
const data = JSON.parse(document.getElementById("graph")!.textContent!) as GraphData;
const heading = document.createElement("header");
const title = document.createElement("h1");
title.textContent = "gradrule: graph";
heading.append(title);
const main = document.createElement("main");
document.body.append(heading, main);
new GraphView(main, data, { wheelZooms: true });
