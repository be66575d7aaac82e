import { useEffect, useRef } from "preact/hooks";
import { type Feed, type FeedKind, initialFeed } from "./feeds";
import type { TensorSpec } from "./types";

/** Returns dtype and shape of a spec: `float32 [?, 3]`. */
export function specText({ dtype, shape }: TensorSpec): string {
  return shape ? `${dtype} [${shape.map((size) => size ?? "?").join(", ")}]` : `${dtype ?? "?"}, any rank`;
}

export interface FeedEditorProps {
  inputs: TensorSpec[];
  feeds: Record<string, Feed>;
  onChange: (update: (before: Record<string, Feed>) => Record<string, Feed>) => void;
}

/** Reads an image file; one that the browser cannot read gives an error to show. */
async function readImage(file: File): Promise<Pick<Feed, "image" | "imageError">> {
  try {
    return { image: await createImageBitmap(file), imageError: undefined };
  } catch {
    return { image: undefined, imageError: `${file.name} is not an image that this browser reads.` };
  }
}

function Preview({ image }: { image: ImageBitmap }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const context = canvas.current!.getContext("2d")!;
    context.clearRect(0, 0, image.width, image.height);
    context.drawImage(image, 0, 0);
  }, [image]);
  return <canvas class="graph-preview" ref={canvas} width={image.width} height={image.height} aria-hidden="true" />;
}

/** Edits the values of placeholders: random numbers, typed values, or an image. */
export function FeedEditor({ inputs, feeds, onChange }: FeedEditorProps) {
  return (
    <div class="stack">
      {inputs.map((spec) => {
        const feed = feeds[spec.name] ?? initialFeed(spec);
        const change = (part: Partial<Feed>) =>
          onChange((before) => ({ ...before, [spec.name]: { ...(before[spec.name] ?? feed), ...part } }));
        return (
          <fieldset class="graph-feed">
            <legend>
              <code>{spec.name}</code> <span class="muted small">{specText(spec)}</span>
            </legend>
            <select
              class="select"
              aria-label="Value"
              value={feed.kind}
              onChange={(event) => change({ kind: event.currentTarget.value as FeedKind })}
            >
              <option value="random">Random</option>
              <option value="values">Typed values</option>
              <option value="image">Image</option>
            </select>
            {feed.kind === "values" ? (
              <textarea
                class="input input-code graph-feed-wide"
                aria-label={`Values of ${spec.name}`}
                rows={3}
                placeholder="[[1, 2], [3, 4]]"
                value={feed.text}
                onInput={(event) => change({ text: event.currentTarget.value })}
              />
            ) : (
              <label class="graph-inline">
                Shape
                <input
                  class="input input-code"
                  value={feed.shape}
                  onInput={(event) => change({ shape: event.currentTarget.value })}
                />
              </label>
            )}
            {feed.kind === "random" && (
              <label class="graph-inline">
                Seed
                <input
                  class="input input-code graph-seed"
                  type="number"
                  value={feed.seed}
                  onInput={(event) => change({ seed: event.currentTarget.valueAsNumber || 0 })}
                />
              </label>
            )}
            {feed.kind === "image" && feed.image && <Preview image={feed.image} />}
            {feed.kind === "image" && (
              <label class="button graph-file">
                Choose image
                <input
                  class="visually-hidden"
                  type="file"
                  accept="image/*"
                  aria-label={`Image for ${spec.name}`}
                  onChange={(event) => {
                    const file = event.currentTarget.files?.[0];
                    if (file) void readImage(file).then(change);
                  }}
                />
              </label>
            )}
            {feed.kind === "image" && feed.imageError && (
              <p class="field-error" role="alert">
                {feed.imageError}
              </p>
            )}
          </fieldset>
        );
      })}
      {!inputs.length && <p class="muted">The program needs no values.</p>}
    </div>
  );
}
