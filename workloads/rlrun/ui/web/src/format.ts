// Formatting of numbers and times for people.
export function number(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  if (size >= 1e-4 && size < 1e9) return value.toLocaleString("en", { maximumSignificantDigits: digits });
  return String(Number(value.toPrecision(digits)));
}

/** Units that only name the kind of value and are omitted after numbers. */
const PLAIN = ["value", "reward", "loss", "ratio", "rate", "1 is perfect"];

export function inUnit(value: number | null | undefined, unit: string): string {
  return PLAIN.includes(unit) ? number(value) : `${number(value)} ${unit}`;
}

export function span(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.max(0, Math.floor(seconds));
  if (whole >= 86400) return `${Math.floor(whole / 86400)}d${Math.floor((whole % 86400) / 3600)}h`;
  if (whole >= 3600) return `${Math.floor(whole / 3600)}h${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")}m`;
  if (whole >= 60) return `${Math.floor(whole / 60)}m${String(whole % 60).padStart(2, "0")}s`;
  return `${whole}s`;
}

export function ago(time: string | null): string {
  return time === null ? "–" : `${span((Date.now() - Date.parse(time)) / 1000)} ago`;
}

export function between(begin: string, end: string): string {
  return span((Date.parse(end) - Date.parse(begin)) / 1000);
}
