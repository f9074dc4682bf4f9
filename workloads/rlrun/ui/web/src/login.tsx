// Login with a token of the cluster, if the server requires one.
import { useState } from "preact/hooks";
import { post } from "./api";
import { Note, Title, useTitle } from "./parts";

export function LoginPage({ why, done }: { why: string; done: () => void }) {
  const [problem, put] = useState<string | null>(null);
  const [busy, wait] = useState(false);
  useTitle("Log in");
  const submit = async (event: SubmitEvent) => {
    event.preventDefault();
    const field = (event.currentTarget as HTMLFormElement).elements.namedItem("token") as HTMLInputElement;
    wait(true);
    try {
      await post("/login", { token: field.value });
      field.value = "";
      done();
    } catch (error) {
      put((error as Error).message);
      field.select();
    }
    wait(false);
  };
  return (
    <>
      <Title>Log in</Title>
      {problem ? <Note kind="problem">{problem.charAt(0).toUpperCase() + problem.slice(1)}.</Note> : <Note>{why.charAt(0).toUpperCase() + why.slice(1)}.</Note>}
      <form class="login" onSubmit={submit}>
        <label>
          <span>Token</span>
          <input id="token" name="token" type="password" autocomplete="off" spellcheck={false} required aria-describedby="of-tokens" />
        </label>
        <button type="submit" disabled={busy}>
          {busy ? "Checking the token…" : "Log in"}
        </button>
      </form>
      <p id="of-tokens">
        The page shows the runs that you may get in the cluster. A token of a ServiceAccount: <code>kubectl create token NAME -n NAMESPACE</code>. For your own account, use the token
        in your kubeconfig or from its login plugin. The server keeps the token in memory until you log out, for at most 12 hours.
      </p>
    </>
  );
}
