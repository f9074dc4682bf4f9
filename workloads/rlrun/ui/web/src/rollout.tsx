// Page of one rollout: turns, colored tokens, and a comparison with another rollout of its group.
import { useState } from "preact/hooks";
import type { DiffView, RolloutPage as Page, Reasons, RolloutView, Tokens, TurnView } from "./answers";
import { address, useAnswer } from "./api";
import { number } from "./format";
import { Answered, Choice, Facts, Section, Title, useTitle } from "./parts";
import { filters, sourceOf } from "./rollouts";
import { change, to } from "./route";
import { Coloured } from "./tokens";

export function RolloutPage({ id, number: at, query }: { id: string; number: number; query: URLSearchParams }) {
  const where = { step: query.get("step"), evaluation: query.get("evaluation") };
  const asked = useAnswer<RolloutView>(address(`/runs/${id}/rollouts/${at}`, where));
  const chosen = filters(query, null) ?? {};
  const run = asked.answer?.run ?? id.split(".")[0];
  const source = sourceOf(where);
  const title = `${run}: rollout ${at} of ${where.step ? `step ${Number(where.step)}` : where.evaluation ? `the ${source}` : "this run"}`;
  useTitle(title);
  return (
    <>
      <nav aria-label="Path">
        <a href={to("/")}>All runs</a>
        <a href={to(`/run/${id}`)}>{run}</a>
        <a href={to(`/run/${id}/rollouts`, chosen)}>{source.charAt(0).toUpperCase() + source.slice(1)}</a>
      </nav>
      <Title>{title}</Title>
      <nav aria-label="Neighbors">
        <Neighbours id={id} at={at} chosen={chosen} />
      </nav>
      <Answered asked={asked}>
        {(found) => (
          <>
            <Known found={found} />
            <Section title="Turns" id="turns">
              {found.turns.length === 0 ? <p class="note">{found.row.error ? `The rollout ended with an error: ${found.row.error}` : "The trace contains no turns of this rollout."}</p> : null}
              <Turns turns={found.turns} />
            </Section>
            {where.evaluation ? null : <ReasonsSection id={id} at={at} step={where.step} />}
            {where.evaluation ? null : <TokensSection id={id} at={at} step={where.step} query={query} />}
            {found.row.group === null ? null : <Beside id={id} at={at} group={found.row.group} where={where} query={query} />}
          </>
        )}
      </Answered>
    </>
  );
}

/** The rollouts before and after this one, in the order and with the filters of the list. */
function Neighbours({ id, at, chosen }: { id: string; at: number; chosen: Record<string, string> }) {
  const [base, turn] = useState(0);
  const asked = useAnswer<Page>(chosen.step || chosen.evaluation ? address(`/runs/${id}/rollouts`, { ...chosen, offset: base, limit: 200 }) : null);
  const rows = asked.answer?.rows ?? [];
  const place = rows.findIndex((row) => row.number === at);
  if (asked.answer && place < 0 && base + 200 < asked.answer.chosen && asked.answer.offset === base) turn(base + 200);
  const link = (row: { number: number } | undefined, text: string, name: "data-next" | "data-previous") =>
    row === undefined ? null : (
      <a class="button" {...{ [name]: true }} href={to(`/run/${id}/rollouts/${row.number}`, chosen)}>
        {text}
      </a>
    );
  if (place < 0) return null;
  return (
    <>
      {link(rows[place - 1], "Previous", "data-previous")}
      {link(rows[place + 1], "Next", "data-next")}
    </>
  );
}

function Known({ found }: { found: RolloutView }) {
  const { row } = found;
  const facts: [string, string][] = [];
  const add = (name: string, value: string | null) => value && facts.push([name, value]);
  add("Reward", row.reward === null ? "none" : number(row.reward));
  add("Advantage", row.advantage === null ? null : number(row.advantage));
  add("Environment", row.environment);
  add("Task", row.taskId);
  add("Group", row.group === null ? null : `${row.group}, rollout ${row.rollout}`);
  add("Sampled", row.completionTokens === null ? null : `${number(row.completionTokens)}${row.tokens === null ? "" : ` of ${number(row.tokens)}`} tokens`);
  add("Versions", row.versions.join(", "));
  add("Ended by", row.finishReason === null ? null : `${row.finishReason}${row.truncated ? ", truncated" : ""}`);
  add("Took", found.seconds === null ? null : `${number(found.seconds, 3)} s`);
  for (const one of found.measures) add(one.metric, one.value === null ? null : number(one.value));
  return (
    <>
      <Facts facts={facts} />
      {found.tools.length ? <p>Tools: {found.tools.join(", ")}</p> : null}
    </>
  );
}

function Turns({ turns }: { turns: TurnView[] }) {
  return (
    <ol class="turns">
      {turns.map((turn, at) => (
        <li key={at} class={turn.role}>
          <h3>{turn.role}</h3>
          {turn.text ? <div class="text">{turn.text}</div> : null}
          {turn.calls.map((call, number) => (
            <div key={number} class="call">
              calls <code>{call.name}</code> <code>{call.arguments}</code>
            </div>
          ))}
        </li>
      ))}
    </ol>
  );
}

/** Explanation of the advantage, versions and tokens, and commands for further analysis. */
function ReasonsSection({ id, at, step }: { id: string; at: number; step: string | null }) {
  const asked = useAnswer<Reasons>(step ? address(`/runs/${id}/rollouts/${at}/reasons`, { step }) : null);
  return (
    <Section title="Why" id="why">
      <Answered asked={asked}>
        {(found) => (
          <>
            {found.why ? <p class="note">There is no explanation: {found.why}.</p> : null}
            {found.samples.map((lines, number) => (
              <div key={`${at}-${number}`} class="text">
                <code>{lines.join("\n")}</code>
              </div>
            ))}
            {found.fetch ? (
              <p class="hint">
                On your machine, first: <code>{found.fetch}</code>
              </p>
            ) : null}
            {found.commands.map((next) => (
              <p key={next.command} class="hint">
                {next.about}: <code>{next.command}</code>
              </p>
            ))}
          </>
        )}
      </Answered>
    </Section>
  );
}

const COLOURS = [["logprob", "log-probability"], ["advantage", "advantage"], ["version", "policy version"]] as const;
export type By = (typeof COLOURS)[number][0];

function TokensSection({ id, at, step, query }: { id: string; at: number; step: string | null; query: URLSearchParams }) {
  const asked = useAnswer<Tokens>(step ? address(`/runs/${id}/rollouts/${at}/tokens`, { step }) : null);
  const by = (query.get("by") ?? "logprob") as By;
  return (
    <Section title="Tokens" id="tokens" tools={<Choice label="Color by" value={by} options={COLOURS} put={(value) => change({ by: value })} />}>
      <Answered asked={asked}>
        {(found) => (
          <>
            {found.why ? <p class="note">There are no tokens: {found.why}.</p> : null}
            {found.sequences.length && !found.decoded ? <p class="note">The run's folder contains no tokenizer, so tokens are shown by their ids.</p> : null}
            {found.sequences.map((sequence, number) => (
              <Coloured key={`${at}-${number}`} sequence={sequence} by={by} />
            ))}
          </>
        )}
      </Answered>
    </Section>
  );
}

interface BesideProps {
  id: string;
  at: number;
  group: number;
  where: { step: string | null; evaluation: string | null };
  query: URLSearchParams;
}

function Beside({ id, at, group, where, query }: BesideProps) {
  const members = useAnswer<Page>(address(`/runs/${id}/rollouts`, { ...where, group, order: "best", limit: 200 }));
  const others = (members.answer?.rows ?? []).filter((row) => row.number !== at);
  const other = query.get("other") ?? "";
  const known = others.some((row) => String(row.number) === other);
  const asked = useAnswer<DiffView>(known ? address(`/runs/${id}/rollouts/${at}/diff/${other}`, where) : null);
  const options = [["", "nothing"], ...others.map((row) => [String(row.number), `rollout ${row.rollout}, reward ${number(row.reward)}`] as const)] as const;
  return (
    <Section title="Comparison within the group" id="beside" tools={<Choice label="Compare with" value={known ? other : ""} options={options} put={(value) => change({ other: value })} />}>
      {known ? (
        <Answered asked={asked}>
          {(found) => (
            <>
              <p class="hint">
                <del>Only this rollout</del> (reward {number(found.first.reward)}), <ins>only the other</ins> (reward {number(found.second.reward)}).
              </p>
              <ol class="turns">
                {found.turns.map((pieces, turn) => (
                  <li key={turn} class={found.roles[turn]}>
                    <h3>{found.roles[turn]}</h3>
                    <div class="text">
                      {pieces.map((piece, number) => {
                        if (piece.side === "first") return <del key={number}>{piece.text}</del>;
                        if (piece.side === "second") return <ins key={number}>{piece.text}</ins>;
                        return <span key={number}>{piece.text}</span>;
                      })}
                    </div>
                  </li>
                ))}
              </ol>
            </>
          )}
        </Answered>
      ) : null}
    </Section>
  );
}
