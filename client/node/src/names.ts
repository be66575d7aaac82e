// Names handed out once each, as TensorFlow does it.

/** `Sign`, `Sign_1`, …; upper and lower case count as equal. */
export class UniqueNames {
  private readonly next = new Map<string, number>();

  constructor(taken: Iterable<string>) {
    for (const name of taken) this.next.set(name.toLowerCase(), 1);
  }

  /** The wished name, or the first free one of `wished_1`, `wished_2`, … */
  make(wished: string): string {
    const key = wished.toLowerCase();
    let number = this.next.get(key) ?? 0;
    let name = wished;
    while (this.next.has(name.toLowerCase())) name = `${wished}_${number++}`;
    this.next.set(key, Math.max(number, 1));
    if (!this.next.has(name.toLowerCase())) this.next.set(name.toLowerCase(), 1);
    return name;
  }
}

/** `y:0` is `y`. */
export function bare(tensor: string): string {
  return tensor.replace(/:0$/, "");
}
