/** Position and scale of a drawing in its window: a point p of the drawing is at `p * k + (x, y)`. */
export interface Camera {
  x: number;
  y: number;
  k: number;
}

export interface Size {
  width: number;
  height: number;
}

const CLOSEST = 4;
const FARTHEST = 0.02;
// Below, the text of boxes is smaller than 12 pixels.
const READABLE = 12 / 13;
// A drawing that fits at this scale is shown whole at first.
const SMALLEST = 0.85;

/** Returns the camera that shows a whole drawing, at most at full size. */
export function fitted(drawing: Size, window: Size): Camera {
  const k = Math.min(1, window.width / drawing.width, window.height / drawing.height);
  return { x: (window.width - drawing.width * k) / 2, y: Math.max((window.height - drawing.height * k) / 2, 0), k };
}

/**
 * Returns the camera at first: the whole drawing if its text can be read then, else its top.
 *
 * @param x Horizontal position in the drawing that is in the middle if the drawing is too wide.
 */
export function opening(drawing: Size, window: Size, x: number): Camera {
  const whole = fitted(drawing, window);
  if (whole.k >= SMALLEST) return whole;
  const k = READABLE;
  const free = window.width - drawing.width * k;
  return { x: free > 0 ? free / 2 : Math.min(0, Math.max(free, window.width / 2 - x * k)), y: 0, k };
}

/** Returns the camera after zooming at a point of the window. */
export function zoomed(camera: Camera, factor: number, x: number, y: number): Camera {
  const k = Math.min(CLOSEST, Math.max(FARTHEST, camera.k * factor));
  return { x: x - ((x - camera.x) * k) / camera.k, y: y - ((y - camera.y) * k) / camera.k, k };
}

export interface Rect {
  x: number;
  y: number;
  w: number;
  h: number;
}

/** Returns the camera that shows a box in the middle, large enough to read. */
export function centred(camera: Camera, box: Rect, window: Size): Camera {
  const k = Math.max(camera.k, READABLE);
  return { x: window.width / 2 - (box.x + box.w / 2) * k, y: window.height / 2 - (box.y + box.h / 2) * k, k };
}

/** Returns the camera moved as little as possible so that a box is inside the window. */
export function revealed(camera: Camera, box: Rect, window: Size): Camera {
  const shift = (start: number, length: number, size: number) =>
    start < 8 ? 8 - start : start + length > size - 8 ? size - 8 - start - length : 0;
  const dx = shift(box.x * camera.k + camera.x, box.w * camera.k, window.width);
  const dy = shift(box.y * camera.k + camera.y, box.h * camera.k, window.height);
  return { x: camera.x + dx, y: camera.y + dy, k: camera.k };
}

export type Direction = "ArrowLeft" | "ArrowRight" | "ArrowUp" | "ArrowDown";

/** Returns the nearest box in a direction; undefined if there is none. */
export function neighbour<Box extends Rect>(boxes: Box[], from: Rect, direction: Direction): Box | undefined {
  const horizontal = direction === "ArrowLeft" || direction === "ArrowRight";
  const sign = direction === "ArrowRight" || direction === "ArrowDown" ? 1 : -1;
  let best: Box | undefined;
  let least = Infinity;
  for (const box of boxes) {
    const dx = box.x + box.w / 2 - from.x - from.w / 2;
    const dy = box.y + Math.min(box.h, 44) / 2 - from.y - Math.min(from.h, 44) / 2;
    const along = sign * (horizontal ? dx : dy);
    // Boxes far to the side count as farther away.
    const distance = along + 2 * Math.abs(horizontal ? dy : dx);
    if (along > 1 && distance < least) [best, least] = [box, distance];
  }
  return best;
}
