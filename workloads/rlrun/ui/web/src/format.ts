// Numbers and times as people read them.
export function number(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
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
