// Tokens of a sequence, colored by one of their values; the arrow keys move between tokens.
import { useState } from "preact/hooks";
import type { TokenSequence } from "./answers";
import { number } from "./format";
import type { By } from "./rollout";

const LEGEND: Record<By, string> = {
  logprob: "The darker a token, the less the policy expected it: from a log-probability of 0 to −5 and below.",
  advantage: "Blue: its advantage is positive, the policy learns to write it. Orange: negative. Stronger is further from 0.",
  version: "The darker a token, the older the policy version that sampled it.",
};

function shade(sequence: TokenSequence, at: number, by: By, newest: number, most: number): string {
  if (!sequence.sampled[at]) return "given";
  if (by === "logprob") return `deep-${Math.min(5, Math.floor(-(sequence.logprobs[at] ?? 0)))}`;
  if (by === "version") return `deep-${Math.min(5, newest - (sequence.versions[at] ?? newest))}`;
  const advantage = sequence.advantages[at] ?? 0;
  const level = most > 0 ? Math.ceil((3 * Math.abs(advantage)) / most) : 0;
  return advantage === 0 ? "deep-0" : `${advantage > 0 ? "good" : "bad"}-${level}`;
}

export function Coloured({ sequence, by }: { sequence: TokenSequence; by: By }) {
  const [chosen, choose] = useState<number | null>(null);
  const versions = sequence.versions.filter((_, at) => sequence.sampled[at]);
  const newest = versions.reduce((most, one) => Math.max(most, one), 0);
  const most = sequence.advantages.reduce((found, one) => Math.max(found, Math.abs(one)), 0);
  const last = sequence.texts.length - 1;
  const pressed = (event: KeyboardEvent) => {
    const moves: Record<string, number> = { ArrowRight: (chosen ?? -1) + 1, ArrowLeft: (chosen ?? 1) - 1, Home: 0, End: last };
    const next = moves[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(Math.min(last, Math.max(0, next)));
  };
  return (
    <>
      <p class="hint">{LEGEND[by]} Underlined: prompt, tools and templates, which are not trained on.</p>
      <div class="tokens" tabIndex={0} role="group" aria-label="Tokens; the arrow keys move between tokens" onKeyDown={pressed}>
        {sequence.texts.map((text, at) => (
          <span key={at} class={`${shade(sequence, at, by, newest, most)}${at === chosen ? " chosen" : ""}`} onClick={() => choose(at)}>
            {text}
          </span>
        ))}
      </div>
      <p role="status" class="token">
        {chosen === null ? "Choose a token to see its values." : describe(sequence, chosen)}
      </p>
      {sequence.cut ? <p class="note">{number(sequence.cut)} more tokens are not shown.</p> : null}
    </>
  );
}

function describe(sequence: TokenSequence, at: number): string {
  const text = JSON.stringify(sequence.texts[at]);
  if (!sequence.sampled[at]) return `Token ${at}, ${text}: given, not sampled.`;
  const probability = Math.exp(sequence.logprobs[at] ?? 0);
  return (
    `Token ${at}, ${text}: log-probability ${number(sequence.logprobs[at])} (${number(100 * probability, 3)} %), ` +
    `advantage ${number(sequence.advantages[at])}, version ${sequence.versions[at]}.`
  );
}
