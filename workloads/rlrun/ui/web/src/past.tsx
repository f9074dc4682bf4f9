// Past of a run: its origin, its forks, and configuration changes between its attempts.
import type { Change, History, Lineage } from "./answers";
import { useAnswer } from "./api";
import { ago } from "./format";
import { Answered, Section, Wide } from "./parts";
import { to } from "./route";

/** Renders nothing for a run that is not a fork and has no forks. */
export function LineageSection({ id }: { id: string }) {
  const { answer } = useAnswer<Lineage>(`/runs/${id}/lineage`, id);
  if (answer === null || (answer.origin === null && answer.forks.length === 0)) return null;
  const { origin, forks } = answer;
  return (
    <Section title="Forks" id="forks">
      {origin ? (
        <>
          <p>
            Forked from {origin.id === null ? <strong>{origin.run}</strong> : <a href={to(`/run/${origin.id}`)}>{origin.run}</a>} at step {origin.step}, the checkpoint of its attempt {origin.attempt}
            {origin.id === null ? ` (${origin.folder}, which is not shown on this page)` : ""}.
          </p>
          {origin.changes.length === 0 ? <p class="note">The fork has no changes.</p> : <Changes label="Changes of the fork" changes={origin.changes} before="There" after="Here" />}
        </>
      ) : null}
      {forks.length === 0 ? null : (
        <ul>
          {forks.map((fork) => (
            <li key={fork.id}>
              <a href={to(`/run/${fork.id}`)}>{fork.label}</a> was forked from this run at step {fork.step}
              {fork.changes.length === 0 ? " without changes" : `, with changes of ${fork.changes.map((one) => one.field).join(", ")}`}.
            </li>
          ))}
        </ul>
      )}
    </Section>
  );
}

export function HistorySection({ id }: { id: string }) {
  const asked = useAnswer<History>(`/runs/${id}/history`, id);
  return (
    <Section title="Configuration changes" id="history">
      <Answered asked={asked}>
        {(found) => (
          <>
            <p class="note">{found.said}</p>
            {found.edits.map((edit) => (
              <section key={edit.attempt} aria-labelledby={`edit-${edit.attempt}`}>
                <h3 id={`edit-${edit.attempt}`}>
                  Attempt {edit.attempt}, from step {edit.firstStep}
                  {edit.started === null ? "" : `, begun ${ago(edit.started)}`}
                </h3>
                {edit.known ? (
                  <Changes label={`Changes with attempt ${edit.attempt}`} changes={edit.changes} before="Before" after="After" />
                ) : (
                  <p>The configuration differs from the previous attempt; the release that ran it did not record the changed fields.</p>
                )}
              </section>
            ))}
          </>
        )}
      </Answered>
    </Section>
  );
}

function Changes({ label, changes, before, after }: { label: string; changes: Change[]; before: string; after: string }) {
  return (
    <Wide label={label}>
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">Field</th>
            <th scope="col">{before}</th>
            <th scope="col">{after}</th>
          </tr>
        </thead>
        <tbody>
          {changes.map((one) => (
            <tr key={one.field}>
              <th scope="row">{one.field}</th>
              <td class="reason">{one.before === "–" ? "–" : <del>{one.before}</del>}</td>
              <td class="reason">{one.after === "–" ? "–" : <ins>{one.after}</ins>}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Wide>
  );
}
