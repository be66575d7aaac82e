import { useEffect, useRef } from "preact/hooks";
import type { GraphData } from "./view/graph_data";
import { GraphView } from "./view/graph_view";

/** Draws a graph. `node`: name of a node to show, in an object so that the same node can be shown again. */
export function Picture({ graph, node }: { graph: GraphData; node: { name: string } | undefined }) {
  const place = useRef<HTMLDivElement>(null);
  const view = useRef<GraphView>(undefined);
  useEffect(() => {
    if (view.current) view.current.update(graph);
    else view.current = new GraphView(place.current!, graph);
  }, [graph]);
  useEffect(() => {
    if (node) view.current?.reveal(node.name);
  }, [node]);
  return <div ref={place} class="graph-picture" />;
}
