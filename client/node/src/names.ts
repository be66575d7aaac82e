// Creates unique node names, as TensorFlow does.

/** Creates unique names: `Sign`, `Sign_1`, …. Names that differ only in case are not unique. */
export class UniqueNames {
  private readonly next = new Map<string, number>();

  constructor(taken: Iterable<string>) {
    for (const name of taken) this.next.set(name.toLowerCase(), 1);
  }

  /** Returns the requested name, or the first unused one of `requested_1`, `requested_2`, … */
  make(requested: string): string {
    const key = requested.toLowerCase();
    let number = this.next.get(key) ?? 0;
    let name = requested;
    while (this.next.has(name.toLowerCase())) name = `${requested}_${number++}`;
    this.next.set(key, Math.max(number, 1));
    if (!this.next.has(name.toLowerCase())) this.next.set(name.toLowerCase(), 1);
    return name;
  }
}

/** Removes the suffix `:0`: `y:0` is the same tensor as `y`. */
export function withoutOutputZero(tensor: string): string {
  return tensor.replace(/:0$/, "");
}
