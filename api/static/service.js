// Talks to the REST API of this origin, and to nothing else.

const TIMEOUT_MS = 20_000;
const TOKENS = /"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;

/** The service refused: `problem` is its RFC 9457 body. */
export class ProblemError extends Error {
  constructor(problem) {
    super(problem.detail || problem.title);
    this.problem = problem;
  }
}

/** Nobody answers, or not in our words. */
export class UnreachableError extends Error {}

/** Whether an error came from the service or the lack of one; any other is a fault of this page. */
export const isAnswer = (error) => error instanceof ProblemError || error instanceof UnreachableError;

/** GET `path`, or POST `body` to it; the parsed answer. */
export async function ask(path, body) {
  const request = { signal: AbortSignal.timeout(TIMEOUT_MS) };
  if (body !== undefined) {
    Object.assign(request, { method: "POST", body: JSON.stringify(body) });
    request.headers = { "Content-Type": "application/json" };
  }
  let answer, content;
  try {
    answer = await fetch(path, request);
    content = parseExactly(await answer.text());
  } catch (error) {
    throw new UnreachableError(`${path}: ${error.message}`);
  }
  if (!answer.ok) throw new ProblemError(content);
  return content;
}

/** All items of a list, page after page, at most `most` of them. */
export async function askAll(path, most) {
  const items = [];
  let cursor = null;
  do {
    const page = await ask(path + (cursor === null ? "" : `&cursor=${encodeURIComponent(cursor)}`));
    items.push(...page.items);
    cursor = page.next_cursor;
  } while (cursor !== null && items.length < most);
  return items;
}

/** JSON.parse, but integers that a Number would round become BigInts: counts are int64. */
export function parseExactly(text) {
  const marked = text.replace(TOKENS, (token) =>
    /^-?\d{16,}$/.test(token) && !Number.isSafeInteger(Number(token)) ? `{"$int64":"${token}"}` : token,
  );
  if (marked === text) return JSON.parse(text);
  return JSON.parse(marked, (_, value) => (value?.$int64 === undefined ? value : BigInt(value.$int64)));
}
