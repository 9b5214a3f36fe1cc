// The drafts of a lone text in one call (CPU.draft). Compiled after native.c.
//
//     T tokens before the first draft · k drafts · C hidden size · V vocabulary

// softmax(x / t): [V]; of t = 0 the first of the largest.
static void soften(const float *x, float *p, long V, float t) {
    float most = x[0], all = 0;
    long first = 0;
    for (long i = 1; i < V; i++) if (x[i] > most) most = x[first = i];
    if (t == 0) {
        for (long i = 0; i < V; i++) p[i] = (i == first) + 0 * x[i];      // NaN and ∞ become NaN
        return;
    }
    #pragma omp simd reduction(+:all)
    for (long i = 0; i < V; i++) {
        float z = (x[i] - most) / t, e = exponential(z);
        p[i] = z < -87 ? 0 : e;
        all += p[i];
    }
    for (long i = 0; i < V; i++) p[i] /= all;
}

// k tokens of a text, each picked from q: [k, V], with its own stream, before the next pass: drafted[k]. x: [T, C],
// of the tokens before them; cos, sin, step: of T + k − 1 tokens. room: T · C, the logits, and that of `layers`.
void drafts(const Model *m, float *x, float *room, const float *cos, const float *sin, const Step *step, long T,
            float t, const int64_t *streams, int64_t *drafted, float *q, long k, long V) {
    long C = m->head->K, D = m->D;
    float *out = room, *logits = out + T * C;
    Step now = *step;
    for (long j = 0; j < k; j++) {
        layers(m, x, out, logits + m->head->N, cos, sin, &now, T);
        product(out + (T - 1) * C, m->head, logits, 1);
        soften(logits, q + j * V, V, t);
        pick_f32(q + j * V, streams + j, drafted + j, 1, V);
        rows(m->embed, drafted + j, x, 1);
        cos += T * D, sin += T * D, now.positions += T, now.slots += T, T = 1;
    }
}
