// Converts float16 and bfloat16 to and from their 16 bits, because JavaScript has no arrays of these types.

const f32 = new Float32Array(1);
const u32 = new Uint32Array(f32.buffer);

/** Returns the bits of the float16 nearest to `value` (ties to even; too large is infinity). */
export function float16Bits(value: number): number {
  f32[0] = value;
  const bits = u32[0]!;
  const sign = (bits >>> 16) & 0x8000;
  const magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  const size = Math.abs(value);
  // Values from halfway between the maximum (65504) and the next power of two round to infinity.
  if (size >= 65520) return sign | 0x7c00;
  if (size < 2 ** -14) return sign | roundToEven(size * 2 ** 24);
  const exponent = Math.floor(Math.log2(size));
  const shift = 2 ** (exponent - 10);
  // log2 may round up to the next power of two just below it; the sum below then carries back by itself.
  return sign | (((exponent + 14) << 10) + roundToEven(size / shift));
}

/** Returns the value of a float16 from its bits. */
export function float16Value(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >>> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0x1f) return fraction ? Number.NaN : sign * Number.POSITIVE_INFINITY;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** Returns the bits of the bfloat16 nearest to `value` (ties to even). */
export function bfloat16Bits(value: number): number {
  f32[0] = value;
  const bits = u32[0]!;
  if ((bits & 0x7fffffff) > 0x7f800000) return ((bits >>> 16) & 0x8000) | 0x7fc0;
  return ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16) & 0xffff;
}

/** Returns the value of a bfloat16 from its bits. */
export function bfloat16Value(bits: number): number {
  u32[0] = bits << 16;
  return f32[0]!;
}

function roundToEven(value: number): number {
  const floor = Math.floor(value);
  const rest = value - floor;
  if (rest !== 0.5) return Math.round(value);
  return floor + (floor % 2);
}
