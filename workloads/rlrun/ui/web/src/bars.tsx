// Stacked bars of times, and a histogram: plain SVG, with the same numbers in a table.
import type { Staleness, Timeline } from "./answers";
import { number } from "./format";

export function Times({ found }: { found: Timeline }) {
  const spans = found.first.length;
  if (spans === 0) return <p class="note">No step has been timed yet.</p>;
  const sums = found.first.map((_, at) => found.parts.reduce((sum, part) => sum + (part.seconds[at] ?? 0), 0));
  // A long first step must not flatten the others: its bar is truncated and marked.
  const most = Math.max(found.high, 1e-9);
  const beyond = sums.filter((sum) => sum > most * 1.0001);
  const width = 100 / spans;
  const mean = (seconds: number[]) => seconds.reduce((sum, one) => sum + one, 0) / spans;
  const total = mean(sums);
  const waits = found.parts.filter((part) => part.waits).reduce((sum, part) => sum + mean(part.seconds), 0);
  return (
    <>
      <p>
        The trainer waits for others in {number(total ? (100 * waits) / total : 0, 2)} % of its time.{" "}
        {waits > total / 2 ? "Steps mostly wait for rollouts: more engines or fewer sampled tokens make them faster." : ""}
        {total > 0 && waits < total / 20 ? "Steps are limited by the trainer: rollouts are ready before the trainer needs them." : ""}
      </p>
      <svg class="times" viewBox="0 0 100 40" preserveAspectRatio="none" role="img" aria-label={`Seconds of a step over ${spans} spans of steps, by the trainer's activity; the table contains the means`}>
        {found.first.map((first, at) => {
          let top = 40;
          const cut = (sums[at] ?? 0) > most * 1.0001;
          return (
            <g key={first}>
              {found.parts.map((part) => {
                const height = (40 * (part.seconds[at] ?? 0)) / (cut ? (sums[at] ?? most) : most);
                top -= height;
                return (
                  <rect key={part.name} class={`part-${part.name}`} x={at * width} y={top} width={Math.max(0.05, width * 0.92)} height={height}>
                    <title>{`steps ${first} to ${found.last[at]}: ${part.label} for ${number(part.seconds[at])} s`}</title>
                  </rect>
                );
              })}
              {cut ? <polygon class="cut" points={`${at * width},2.4 ${(at + 0.46) * width},0.2 ${(at + 0.92) * width},2.4`} /> : null}
            </g>
          );
        })}
      </svg>
      <p class="axis">
        <span>step {found.first[0]}</span>
        <span>
          up to {number(most, 3)} s per step
          {beyond.length ? `; ${beyond.length === 1 ? "one bar is" : `${beyond.length} bars are`} cut, up to ${number(Math.max(...beyond), 3)} s per step` : ""}
        </span>
        <span>step {found.last.at(-1)}</span>
      </p>
      <table class="plain">
        <caption>The trainer's time, mean of a step</caption>
        <thead>
          <tr>
            <th scope="col">The trainer…</th>
            <th scope="col">Seconds</th>
            <th scope="col">Share</th>
          </tr>
        </thead>
        <tbody>
          {found.parts.map((part) => (
            <tr key={part.name}>
              <th scope="row">
                <i class={`swatch part-${part.name}`} /> {part.label}
              </th>
              <td>{number(mean(part.seconds), 3)}</td>
              <td>{number(total ? (100 * mean(part.seconds)) / total : 0, 2)} %</td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

export function Lags({ found }: { found: Staleness }) {
  const total = found.tokens.reduce((sum, one) => sum + one, 0);
  if (total === 0) return <p class="note">No token of step {found.step} was sampled by a known version.</p>;
  const most = Math.max(...found.tokens);
  return (
    <table class="plain lags">
      <caption>Tokens of step {found.step} by the age of the policy that sampled them</caption>
      <thead>
        <tr>
          <th scope="col">Versions old</th>
          <th scope="col">Tokens</th>
          <th scope="col">Share</th>
          <td />
        </tr>
      </thead>
      <tbody>
        {found.lags.map((lag, at) => {
          const tokens = found.tokens[at] ?? 0;
          return (
            <tr key={lag}>
              <th scope="row">{lag}</th>
              <td>{number(tokens)}</td>
              <td>{number((100 * tokens) / total, 3)} %</td>
              <td class="bar" aria-hidden="true">
                <svg viewBox="0 0 100 10" preserveAspectRatio="none">
                  <rect class="part-compute" width={(100 * tokens) / most} height="10" />
                </svg>
              </td>
            </tr>
          );
        })}
      </tbody>
    </table>
  );
}
