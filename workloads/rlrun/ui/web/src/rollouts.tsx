// Rollouts of a step: filtered and sorted by the server, a page at a time.
import type { RolloutPage as Page, RolloutRow, TracedSteps } from "./answers";
import { address, useAnswer } from "./api";
import { number } from "./format";
import { Answered, Choice, Field, Note, Title, useTitle, Wide } from "./parts";
import { change, to } from "./route";

const LIMIT = 50;
export const FILTERS = ["step", "evaluation", "environment", "rewardMin", "rewardMax", "tokensMin", "tokensMax", "group", "order"] as const;
const ORDERS = [["worst", "worst reward first"], ["best", "best reward first"], ["trace", "as trained"], ["longest", "longest first"], ["shortest", "shortest first"]] as const;

/** Worst answers come first, because they help most to find problems. */
const FIRST = "worst";
const RARE = ["rewardMin", "rewardMax", "tokensMin", "tokensMax", "group"];

/** Displayed name of the current trace, for titles. */
export function sourceOf(chosen: Record<string, string | null | undefined>): string {
  if (chosen.evaluation && !chosen.step) return `held-out answers of version ${Number(chosen.evaluation)}`;
  return chosen.step ? `rollouts of step ${Number(chosen.step)}` : "rollouts";
}

/** Filters of a URL, with the newest step as the default. */
export function filters(query: URLSearchParams, traced: TracedSteps | null): Record<string, string> | null {
  const found: Record<string, string> = { order: FIRST, ...Object.fromEntries(FILTERS.flatMap((name) => (query.get(name) ? [[name, query.get(name) as string]] : []))) };
  if (found.step || found.evaluation) return found;
  const last = traced?.spans.at(-1)?.[1];
  if (last !== undefined) return { ...found, step: String(last) };
  const version = traced?.evaluations.at(-1);
  return version === undefined ? null : { ...found, evaluation: String(version) };
}

export function RolloutsPage({ id, query }: { id: string; query: URLSearchParams }) {
  const traced = useAnswer<TracedSteps>(`/runs/${id}/traces`, id);
  const chosen = filters(query, traced.answer);
  const offset = Number(query.get("offset") ?? 0);
  const asked = useAnswer<Page>(chosen === null ? null : address(`/runs/${id}/rollouts`, { ...chosen, offset, limit: LIMIT }));
  const run = traced.answer?.run ?? id.split(".")[0];
  const title = `${run}: ${sourceOf(chosen ?? {})}`;
  useTitle(title);
  const put = (name: string) => (value: string) => change({ [name]: value, offset: null });
  return (
    <>
      <nav aria-label="Path">
        <a href={to("/")}>All runs</a>
        <a href={to(`/run/${id}`)}>{run}</a>
      </nav>
      <Title>{title}</Title>
      <Answered asked={traced}>
        {(known) => {
          if (chosen === null) return <Note>No step has a trace yet; rollouts appear with the first trained step.</Note>;
          const field = (name: string, label: string) => <Field label={label} value={chosen[name] ?? ""} put={put(name)} />;
          const environments = (asked.answer?.environments ?? []).map((name) => [name, name] as const);
          return (
            <>
              <div class="tools" data-filter>
                {chosen.evaluation && !chosen.step ? null : <Field label="Step" value={chosen.step ?? ""} put={(step) => change({ step, evaluation: null, offset: null })} />}
                {known.evaluations.length ? (
                  <Choice
                    label="Held-out answers"
                    value={chosen.evaluation ?? ""}
                    options={[["", "no (training)"], ...known.evaluations.map((version) => [String(version), `of version ${version}`] as const)]}
                    put={(evaluation) => change({ evaluation, step: null, offset: null })}
                  />
                ) : null}
                <Choice label="Environment" value={chosen.environment ?? ""} options={[["", "all"], ...environments]} put={put("environment")} />
                <Choice label="Order" value={chosen.order ?? FIRST} options={ORDERS} put={(order) => change({ order: order === FIRST ? null : order, offset: null })} />
                <details class="more" open={RARE.some((name) => chosen[name])}>
                  <summary>More filters</summary>
                  <div class="tools">
                    {field("rewardMin", "Reward from")}
                    {field("rewardMax", "Reward to")}
                    {field("tokensMin", "Tokens from")}
                    {field("tokensMax", "Tokens to")}
                    {field("group", "Group")}
                  </div>
                </details>
              </div>
              <p class="hint">Traces: {known.spans.map(([first, last]) => (first === last ? `step ${first}` : `steps ${first} to ${last}`)).slice(-6).join(", ") || "no training traces"}.</p>
              <Answered asked={asked}>{(page) => <Rows id={id} page={page} chosen={chosen} offset={offset} />}</Answered>
            </>
          );
        }}
      </Answered>
    </>
  );
}

function Rows({ id, page, chosen, offset }: { id: string; page: Page; chosen: Record<string, string>; offset: number }) {
  if (page.chosen === 0) return <Note>No rollout matches these filters (of {number(page.total)}).</Note>;
  const last = Math.min(page.chosen, offset + LIMIT);
  return (
    <>
      <p role="status">
        {number(offset + 1)} to {number(last)} of {number(page.chosen)}
        {page.chosen < page.total ? ` (${number(page.total)} in the trace)` : ""}; reward {number(page.rewardMean)} on average, from {number(page.rewardMin)} to {number(page.rewardMax)}
      </p>
      <Wide label="Rollouts">
        <table class="cards rollouts">
          <thead>
            <tr>
              <th scope="col">Rollout</th>
              <th scope="col" class="number">Reward</th>
              <th scope="col">Prompt and answer</th>
              <th scope="col" class="number">Advantage</th>
              <th scope="col">Environment</th>
              <th scope="col" class="number">Tokens</th>
              <th scope="col" class="number">Turns</th>
              <th scope="col">Versions</th>
            </tr>
          </thead>
          <tbody>
            {page.rows.map((row) => (
              <Line key={row.number} row={row} href={to(`/run/${id}/rollouts/${row.number}`, chosen)} />
            ))}
          </tbody>
        </table>
      </Wide>
      <div class="tools">
        <button type="button" data-previous disabled={offset === 0} onClick={() => change({ offset: Math.max(0, offset - LIMIT) || null })}>
          Page before
        </button>
        <button type="button" data-next disabled={last >= page.chosen} onClick={() => change({ offset: offset + LIMIT })}>
          Next page
        </button>
      </div>
    </>
  );
}

function Line({ row, href }: { row: RolloutRow; href: string }) {
  return (
    <tr>
      <th scope="row">
        <a href={href}>
          {row.group === null ? row.taskId : `group ${row.group}`}, {row.rollout ?? row.number}
        </a>
      </th>
      <td class="number reward">{row.reward === null ? "no reward" : number(row.reward)}</td>
      <td class="excerpt">
        {row.error ? <em>{row.error}</em> : null}
        <span>{row.prompt}</span>
        <span>{row.answer}</span>
      </td>
      <td class="number less">{row.advantage === null ? null : number(row.advantage)}</td>
      <td class="less">{row.environment}</td>
      <td class="number tokens-of">
        {row.completionTokens === null ? null : number(row.completionTokens)}
        <span class="unit"> tokens</span>
        {row.truncated ? " (cut)" : ""}
      </td>
      <td class="number less">{row.turns}</td>
      <td class="less">{row.versions.join(", ")}</td>
    </tr>
  );
}
