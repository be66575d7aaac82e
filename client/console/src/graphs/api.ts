import { ApiError, call, type Problem } from "../api/client";
import { bearerToken } from "../api/token";
import type { Nested } from "./types";
import type { CompileAnswer, EvaluateAnswer, GraphFacts, PictureAnswer, Program } from "./types";

/** A graph that this page uploaded. */
export interface LoadedGraph {
  name: string;
  /** The file, or the text that somebody pasted: it is sent again if the server forgets it. */
  data: Blob;
  facts: GraphFacts;
}

/** Stores a graph on the server: bytes of a GraphDef, protobuf text, protobuf JSON, or an ONNX model. */
export async function uploadGraph(name: string, data: Blob, signal?: AbortSignal): Promise<LoadedGraph> {
  const headers: Record<string, string> = { "Content-Type": "application/octet-stream" };
  const token = bearerToken();
  if (token) headers["Authorization"] = `Bearer ${token}`;
  const request: RequestInit = { method: "POST", headers, body: data };
  if (signal) request.signal = signal;
  let response: Response;
  try {
    response = await fetch("console/graph", request);
  } catch (error) {
    if (signal?.aborted) throw error;
    const detail = "Check that `gradrule gateway` is running and that the network reaches it.";
    throw new ApiError({ title: "The gateway does not answer", status: 0, detail });
  }
  const answer = (await response.json().catch(() => ({}))) as GraphFacts & Partial<Problem>;
  if (!response.ok) {
    throw new ApiError({ ...answer, title: response.statusText, status: response.status, detail: answer.detail ?? "" });
  }
  return { name, data, facts: answer };
}

/** Explains a program, and draws its graph. */
export function explain(graph: LoadedGraph, spec: unknown, signal: AbortSignal): Promise<PictureAnswer> {
  const body = { structure: graph.facts.structure, request: { spec } };
  return again(graph, () => call<PictureAnswer>("POST", "console/picture", { body, signal }));
}

/** Runs a program that is not stored. */
export function evaluate(graph: LoadedGraph, spec: unknown, feeds: Record<string, Nested>): Promise<EvaluateAnswer> {
  return again(graph, () => call<EvaluateAnswer>("POST", "v1/evaluate", { body: { spec, feeds } }));
}

/** Runs a stored program. */
export function evaluateProgram(program: string, feeds: Record<string, Nested>): Promise<EvaluateAnswer> {
  return call<EvaluateAnswer>("POST", "v1/evaluate", { body: { program, feeds } });
}

/** Stores a program under a name that the server derives from its content. */
export async function storeProgram(graph: LoadedGraph, spec: unknown): Promise<string> {
  const answer = await again(graph, () => call<CompileAnswer>("POST", "v1/programs", { body: { spec } }));
  return answer.program?.name ?? "";
}

/** Returns the names of all rules. */
export async function ruleNames(signal: AbortSignal): Promise<string[]> {
  return names<{ rules?: { name: string }[] }>("v1/rules", signal, (answer) => answer.rules ?? []);
}

/** Returns the names of the stored programs. */
export async function programNames(signal: AbortSignal): Promise<string[]> {
  return names<{ programs?: Program[] }>("v1/programs", signal, (answer) => answer.programs ?? []);
}

async function names<Answer>(
  path: string,
  signal: AbortSignal,
  items: (answer: Answer & { nextPageToken?: string }) => { name?: string }[],
): Promise<string[]> {
  const found: string[] = [];
  let pageToken: string | undefined;
  do {
    const answer = await call<Answer & { nextPageToken?: string }>("GET", path, {
      query: { pageSize: 500, pageToken },
      signal,
    });
    found.push(...items(answer).map(({ name }) => name ?? ""));
    pageToken = answer.nextPageToken;
  } while (pageToken && found.length < 5000);
  return found.map((name) => name.replace(/^rules\//, ""));
}

/** Calls again after another upload if the server deleted the graph in the meantime. */
async function again<Answer>(graph: LoadedGraph, send: () => Promise<Answer>): Promise<Answer> {
  try {
    return await send();
  } catch (error) {
    if (!(error instanceof ApiError) || error.problem.reason !== "BLOB_NOT_FOUND") throw error;
    await uploadGraph(graph.name, graph.data);
    return send();
  }
}
